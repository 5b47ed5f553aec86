"""Every Struct that crosses a process: the map of the whole system. Field order is the wire format (array_like).

Arrays (`np.ndarray`) are inline when small and extra zero-copy ZMQ frames when large (transport/wire/codec.py); per-step data of
sequences travels as packed columns (transport/wire/columns.py). A change here changes PROTOCOL_VERSION. Ids on the per-step path
are small integers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from trireme.hashing import KEY_BYTES
from trireme.params import RowParams
from trireme.topology.lockstep import Agreed, Ballot, Mode
from trireme.transport.wire.columns import Column, Flags, Ids, check_columns

PROTOCOL_VERSION = 12
MAX_PREFIX = 1024  # prompt blocks named in a Route
MAX_WAITED_S = 86400.0  # maximum of Submit.waited_s

Role = Literal["front", "engine", "worker", "coordinator", "admin"]
EndReason = Literal["stop", "length", "abort", "error"]


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: positional on the wire, tagged by class name."""


# ---------------------------------------------------------------- handshake and liveness: every connection


class Hello(Wire, frozen=True):
    """First message of a connecting side. `name` is unique per process (`front-0`); with `pid` a peer on the same host can watch
    it."""

    protocol: int
    config_hash: bytes
    role: Role
    name: str
    epoch: int
    pid: int


class Welcome(Wire, frozen=True):
    """Answer of the bound side. A new `epoch` under the same `name` means that the process was replaced."""

    protocol: int
    config_hash: bytes
    role: Role
    name: str
    epoch: int
    pid: int
    facts: EngineFacts | None = None


class Refused(Wire, frozen=True):
    reason: str


class Ping(Wire, frozen=True):
    sent_ns: int


class Pong(Wire, frozen=True):
    sent_ns: int
    progress: int = 0  # step counter stamped by the loop itself
    stalled: str = ""  # why there is no progress although there is work


class EngineFacts(Wire, frozen=True):
    """What a frontend must know about an engine before it may submit."""

    engine: int
    max_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_waiting: int
    max_waiting_tokens: int


# ---------------------------------------------------------------- frontend <-> engine core


class Submit(Wire, frozen=True):
    """One choice of one request. `prompt` is int32 token ids; its last `num_replayed` ids were already emitted to the client and
    count as output for max_tokens, min_tokens and penalties, so that `params` need no change after a move."""

    rid: int  # unique per frontend
    prompt: np.ndarray
    params: RowParams
    salt: bytes = b""
    ticket: int = 0  # per (frontend, engine), rising; 0 without coordinator
    priority: int = 0
    deadline_s: float = 0.0  # maximum wait in the queue; 0: no limit
    num_replayed: int = 0
    num_moves: int = 0  # times it was accepted by engines that it then lost: a full queue does not reject it again
    stays: bool = False  # pinned to this engine by its caller: never reclaimed
    client: bytes = b""  # digest that identifies the client, for fair policies; empty: unknown
    total_s: float = 0.0  # maximum time until its end, queue included; 0: no limit
    waited_s: float = 0.0  # seconds waited before this submit: decides its position in the engine's queue
    itl_target_s: float = (
        0.0  # seconds that it may wait for a token while others' prompts are computed; 0: the engine's target
    )


class Abort(Wire, frozen=True):
    rids: list[int]


class Call(Wire, frozen=True):
    """A rare request to an engine or worker, answered by CallReply. The receiver has a fixed table of methods."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class CallReply(Wire, frozen=True):
    call_id: int
    ok: bool
    result: Any = None
    error: str = ""


class LogprobRow(Wire, frozen=True):
    """Log-probabilities of `num_positions` consecutive tokens of one sequence, columnar.

    token_ids and logprobs are [num_positions, 1 + k]: column 0 is the actual token, then the k likeliest in order.
    ranks is [num_positions], 1 for the likeliest token.
    """

    rid: int  # the slot on StepResult, the request id on StepOutputs
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    ranks: np.ndarray  # int32


class First(Wire, frozen=True):
    """Sent with the first token of a sequence: the cost of its prompt."""

    rid: int
    num_cached: int  # prompt tokens found in the prefix cache
    queued_s: float
    prefill_s: float


class End(Wire, frozen=True):
    """Sent exactly once per submitted sequence. `stop_token` is the id that ended it, if one did (also among the tokens)."""

    rid: int
    reason: EndReason
    stop_token: int = -1
    error: str = ""  # with reason "error"
    error_code: str = ""  # `code` of the corresponding TriremeError
    num_preemptions: int = 0
    retry_after_s: float = 0.0  # with a transient error


class StepOutputs(Wire, frozen=True):
    """All outputs of one engine step for one frontend. rids[i] gained tokens[i]; a rid may repeat, in order."""

    engine: int
    step: int
    rids: Ids
    tokens: Column
    firsts: list[First] = []
    ends: list[End] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[LogprobRow] = []
    placed: list[int] = []  # requests that enter the batch for the first time; sent before the step that computes them
    returned: list[
        tuple[int, int, float]
    ] = []  # reclaimed requests, without an end: (rid, engine for it, seconds it has waited)

    def __post_init__(self) -> None:
        if len(self.rids) != 2 * len(self.tokens) or len(self.tokens) % 4:
            check_columns({"rids": (len(self.rids), 8), "tokens": (len(self.tokens), 4)})


class EngineDown(Wire, frozen=True):
    """Last message of an engine: every request it holds is lost. `error` is the root cause as one sentence."""

    engine: int
    error: str


# ---------------------------------------------------------------- engine core <-> workers


class RingPlace(Wire, frozen=True):
    """Where a ring of messages in shared memory is (transport/memory/ring.py): paths of its memory and of the pipes that announce
    messages, one to read from, or one for each reader to write to; and which of its readers the receiver of this is."""

    memory: str
    bells: list[str]
    reader: int
    num_readers: int


class WorkerInit(Wire, frozen=True):
    """First message to a worker after its Hello. `config` is the resolved EngineConfig as msgpack; `arena` the fd path of
    the shared memory for collectives (empty with one worker), `peers` that of the engines in lockstep (empty without). `orders`:
    the ring through which all later messages come; `results`: that for StepResults of the worker that reports; None: by socket."""

    config: bytes
    dp_rank: int
    worker: int
    arena: str = ""
    peers: str = ""
    orders: RingPlace | None = None
    results: RingPlace | None = None


class LoadProgress(Wire, frozen=True):
    worker: int
    phase: str
    done: int
    total: int


class WorkerLoaded(Wire, frozen=True):
    """Weights are loaded. `free_bytes` is the memory available for KV blocks, `block_bytes` the size of one block on this
    worker."""

    worker: int
    vocab_size: int
    block_bytes: int
    free_bytes: int
    weight_bytes: int
    phases: dict[str, float]  # seconds of each part of the start
    decisions: list[tuple[str, str, str]] = []  # (what, value, because), e.g. instruction set, attention


class SetupKV(Wire, frozen=True):
    num_blocks: int


class WorkerReady(Wire, frozen=True):
    worker: int
    phases: dict[str, float] = {}


class WorkerFault(Wire, frozen=True):
    """The worker's own exception; it is dying or cannot continue. `exit_code` is that of its kind."""

    worker: int
    error: str
    hint: str = ""
    traceback: str = ""
    exit_code: int = 1


class NewRow(Wire, frozen=True):
    """A sequence placed in the persistent batch, with everything the worker must know. Also sent when a preempted request
    resumes."""

    row: int  # slot in the persistent batch, 0..max_num_seqs-1
    tokens: np.ndarray  # int32, all tokens known so far: prompt, then outputs
    num_prompt: int  # how many of them are the user's prompt (penalties distinguish prompt and output)
    params: RowParams
    blocks: list[int]


class StepPlan(Wire, frozen=True):
    """One step: deltas over the persistent batch, applied in the order of the fields."""

    step: int
    freed: list[int]  # slots to free
    new: list[NewRow]
    grown_rows: Column  # these slots ...
    grown_blocks: Column  # ... got these blocks, in order; not for sequences in `new`
    copies: list[tuple[int, int]]  # (source block, destination block), before anything is computed
    rows: Column  # slots computed in this step
    num_tokens: Column  # per scheduled sequence: tokens computed
    num_computed: Column  # per scheduled sequence: tokens whose KV is already there
    tokens: Column  # per scheduled sequence: id sampled since the worker last saw it; -1: none, or the worker holds it
    sample: Flags  # per scheduled sequence: its last computed position yields a new token
    ballot: Ballot | None = None  # of lockstep engines; such a plan may be empty

    def __post_init__(self) -> None:
        size = len(self.rows)
        if not (
            size == len(self.num_tokens) == len(self.num_computed) == len(self.tokens) == 4 * len(self.sample)
            and len(self.grown_rows) == len(self.grown_blocks)
            and not len(self.grown_rows) % 4
        ):
            columns = {name: (len(getattr(self, name)), 4) for name in ("rows", "num_tokens", "num_computed", "tokens")}
            check_columns({**columns, "sample": (len(self.sample), 1)})
            check_columns({"grown_rows": (len(self.grown_rows), 4), "grown_blocks": (len(self.grown_blocks), 4)})


class NextToken(Wire, frozen=True):
    """Delta of a StepPlan: the batch of the previous plan, in which every sequence sampled, each one token further, with nothing
    new but blocks. `tokens` is that of StepPlan, or empty when unchanged."""

    step: int
    grown_rows: Column = b""
    grown_blocks: Column = b""
    tokens: Column = b""

    def __post_init__(self) -> None:
        if len(self.grown_rows) != len(self.grown_blocks) or len(self.grown_rows) % 4 or len(self.tokens) % 4:
            check_columns({"grown_rows": (len(self.grown_rows), 4), "grown_blocks": (len(self.grown_blocks), 4)})
            check_columns({"tokens": (len(self.tokens), 4)})


class RowFault(Wire, frozen=True):
    """An error of one sequence; the rest of the batch is unaffected."""

    row: int
    error: str
    by_request: bool = False  # its own parameters cannot be satisfied; nothing has failed


class StepResult(Wire, frozen=True):
    """Answer of the reporting worker. The sequence in slot rows[i] sampled tokens[i]; faulted ones are in neither."""

    step: int
    rows: Column
    tokens: Column
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[LogprobRow] = []  # of prompt tokens start + 1 ... of a chunk [start, stop)
    faults: list[RowFault] = []
    execute_s: float = 0.0
    agreed: Agreed | None = None  # result of the ballots of all engines

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.tokens) or len(self.rows) % 4:
            check_columns({"rows": (len(self.rows), 4), "tokens": (len(self.tokens), 4)})


# ---------------------------------------------------------------- coordinator


class Load(Wire, frozen=True):
    """An engine's report, sent on change (at most every 20 ms) and every second. `admitted` is the highest ticket seen per
    frontend, so a late report never erases a newer routing decision."""

    engine: int
    epoch: int
    seq: int
    progress: int  # steps completed
    num_waiting: int
    num_running: int
    waiting_tokens: int
    running_tokens: int
    blocks_used: int
    num_blocks: int
    oldest_wait_s: float
    admitted: dict[str, int]
    finished: int  # sequences ended since start


class KVEvents(Wire, frozen=True):
    """Blocks that became findable in an engine, and those that no longer are, since the previous report. `reset`: discard all
    earlier ones. A reader that misses a `seq` asks for everything again (Resync)."""

    engine: int
    epoch: int
    seq: int
    stored: bytes  # 8-byte keys
    removed: bytes
    num_blocks: int  # blocks of the engine: the upper bound of keys
    reset: bool = False

    def __post_init__(self) -> None:
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            raise ValueError(f"{len(self.stored)} and {len(self.removed)} bytes are no keys of {KEY_BYTES} bytes each")


class Resync(Wire, frozen=True):
    """The coordinator asks an engine for all of its blocks, having missed a report."""

    engine: int


class GiveBack(Wire, frozen=True):
    """The coordinator reclaims up to `count` requests that never started; their frontends, told by `returned` of StepOutputs,
    send them to engine `to`. Ignored by another incarnation of the engine than `epoch`."""

    engine: int
    epoch: int
    count: int
    to: int


class Route(Wire, frozen=True):
    """A frontend asks for an engine. `pin` >= 0 demands that engine."""

    rid: int
    num_tokens: int
    num_choices: int = 1
    pin: int = -1
    label: str = ""  # zone of the request: engines with this label are preferred
    prefix: bytes = b""  # keys of the prompt's first blocks (trireme/hashing.py), for prefix policies

    def __post_init__(self) -> None:
        if len(self.prefix) % KEY_BYTES or len(self.prefix) > MAX_PREFIX * KEY_BYTES:
            raise ValueError(
                f"a prefix of {len(self.prefix)} bytes; it is at most {MAX_PREFIX} keys of {KEY_BYTES} bytes"
            )


class Routed(Wire, frozen=True):
    """`engine` < 0: none is available, with the reason in `error`."""

    rid: int
    engine: int
    epoch: int
    ticket: int
    error: str = ""


class Member(Wire, frozen=True):
    engine: int
    epoch: int
    state: Literal["starting", "ready", "draining", "down"]
    load: Load | None = None
    in_flight: int = 0  # tickets issued and not yet reported as admitted


class View(Wire, frozen=True):
    """Membership and load as the coordinator sees them; frontends keep the last one while it is away."""

    seq: int
    members: list[Member]


class Released(Wire, frozen=True):
    """A frontend returns tickets it will not use (its client left before the submit)."""

    engine: int
    epoch: int
    count: int


class WaveOrder(Wire, frozen=True):
    """How far a lockstep rank may go, as a state and not as a change: a late or repeated one is harmless. `number` counts pauses
    and resumes; the highest one wins."""

    epoch: int  # of the engines it is meant for
    wave: int
    number: int = 0
    mode: Mode = ""


class WaveReport(Wire, frozen=True):
    """How far the rank is, likewise a state. `wants`: it is parked with requests that may go on, and needs the next wave."""

    engine: int
    epoch: int
    wave: int
    is_running: bool
    number: int = 0
    mode: Mode = ""
    wants: bool = False


# ---------------------------------------------------------------- supervisor <-> its children, over the boot channel


class Boot(Wire, frozen=True):
    """Settings of a child, sent over an inherited socket, never through argv or the environment."""

    role: Role
    name: str
    epoch: int
    config: bytes  # resolved EngineConfig as msgpack
    config_hash: bytes
    run_dir: str  # private directory of the sockets (mode 0700)
    index: int = 0  # dp rank, frontend number or worker number
    listen_fd: int = -1  # inherited listening socket of the HTTP port
    peers: str = ""  # fd path of the shared memory of lockstep engines
    secret_keys: dict[str, bytes] = {}  # CURVE keys when tcp leaves loopback
    pause: Mode = ""  # pause mode of an engine's previous incarnation


class Progress(Wire, frozen=True):
    source: str
    phase: str
    done: int
    total: int


class Ready(Wire, frozen=True):
    source: str
    facts: dict[str, Any] = {}
    phases: dict[str, float] = {}  # seconds of each part of the start, in order; they add up to the time since `began`
    decisions: list[tuple[str, str, str]] = []
    began: float = 0.0  # a reading of time.monotonic


class Failed(Wire, frozen=True):
    """A child's own exception, to be printed once, last, by the parent."""

    source: str
    error: str
    hint: str = ""
    traceback: str = ""
    exit_code: int = 1


class Beat(Wire, frozen=True):
    """A child's main loop completed an iteration. Only a child that has sent one is expected to send more."""

    progress: int


class Paused(Wire, frozen=True):
    """An engine outside lockstep is in this pause mode from now on, and so is its next incarnation. "": none."""

    mode: Mode


class Drain(Wire, frozen=True):
    """Finish and exit: take new work for `notice_s` more seconds, then let running requests end within `deadline_s`."""

    deadline_s: float
    notice_s: float = 0.0


FrontToEngine = Hello | Submit | Abort | Call | Ping
EngineToFront = Welcome | Refused | StepOutputs | CallReply | EngineDown | Pong
WorkerToCore = Hello | LoadProgress | WorkerLoaded | WorkerReady | WorkerFault | StepResult | CallReply | Pong
CoreToWorker = Welcome | Refused | WorkerInit | SetupKV | StepPlan | NextToken | Call | Ping
ToCoordinator = Hello | Load | KVEvents | Route | Released | WaveReport | Call | Ping
FromCoordinator = Welcome | Refused | Routed | View | Resync | GiveBack | WaveOrder | CallReply | Pong
ToChild = Boot | Drain | Progress
FromChild = Progress | Ready | Failed | Beat | Paused

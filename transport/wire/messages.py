"""Every Struct that crosses a process: the map of the whole system. Field order is the wire format (array_like).

Arrays (`np.ndarray`) travel inline when small and as extra ZMQ frames, without a copy, when large (transport/wire/codec.py); what
every step carries per row travels as packed columns (transport/wire/columns.py).
A change here changes PROTOCOL_VERSION. Ids on the per-step path are small integers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from trireme.hashing import KEY_BYTES
from trireme.params import RowParams
from trireme.topology.lockstep import Agreed, Ballot, Mode
from trireme.transport.wire.columns import Column, Flags, Ids, check_columns

PROTOCOL_VERSION = 9
MAX_PREFIX = 1024  # blocks of a prompt that a Route names
MAX_WAITED_S = 86400.0  # that a Submit may say

Role = Literal["front", "engine", "worker", "coordinator", "admin"]
EndReason = Literal["stop", "length", "abort", "error"]


class Wire(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: positional on the wire, tagged by class name."""


# ---------------------------------------------------------------- handshake and liveness: every connection


class Hello(Wire, frozen=True):
    """First message of a connecting side. `name` is unique per process (`front-0`); `pid` lets a same-host peer watch it."""

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
    stalled: str = ""  # why there is no progress although there should be


class EngineFacts(Wire, frozen=True):
    """What a front end must know of an engine before it may submit."""

    engine: int
    max_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_waiting: int
    max_waiting_tokens: int


# ---------------------------------------------------------------- front end <-> engine core


class Submit(Wire, frozen=True):
    """One choice of one request. `prompt` is int32 token ids; its last `num_replayed` ids were already emitted to the client
    and count as output for max_tokens, min_tokens and penalties, so that `params` need no change after a move."""

    rid: int  # unique per front end
    prompt: np.ndarray
    params: RowParams
    salt: bytes = b""
    ticket: int = 0  # per (front end, engine), rising; 0 without coordinator
    priority: int = 0
    deadline_s: float = 0.0  # most seconds to wait in the queue; 0 is none
    num_replayed: int = 0
    num_moves: int = 0  # times it was accepted before, by engines that it lost: a full queue does not refuse it again
    stays: bool = False  # its caller demanded this engine: never given back
    client: bytes = b""  # a digest that tells whom it is for, for policies that share fairly; empty: nobody said
    total_s: float = 0.0  # most seconds until its end, queue and all; 0 is none
    waited_s: float = (
        0.0  # since it was asked for, before it came here: of the engine's queue it takes the place of its age
    )


class Abort(Wire, frozen=True):
    rids: list[int]


class Call(Wire, frozen=True):
    """A rare request to an engine or worker, answered by CallReply. Methods are a fixed table at the receiver."""

    call_id: int
    method: str
    args: dict[str, Any] = {}


class CallReply(Wire, frozen=True):
    call_id: int
    ok: bool
    result: Any = None
    error: str = ""


class LogprobRow(Wire, frozen=True):
    """Log-probabilities of `num_positions` consecutive tokens of one row, columnar.

    token_ids and logprobs are [num_positions, 1 + k]: column 0 is the actual token, then the k likeliest in order.
    ranks is [num_positions], 1 for the likeliest token.
    """

    rid: int  # the row index on StepResult, the request id on StepOutputs
    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    ranks: np.ndarray  # int32


class First(Wire, frozen=True):
    """Sent with the first token of a row: what the prompt cost."""

    rid: int
    num_cached: int  # prompt tokens found in the prefix cache
    queued_s: float
    prefill_s: float


class End(Wire, frozen=True):
    """Sent exactly once per submitted row. `stop_token` is the id that ended it, if one did (it is also among the tokens)."""

    rid: int
    reason: EndReason
    stop_token: int = -1
    error: str = ""  # with reason "error"
    error_code: str = ""  # `code` of the TriremeError it stands for
    num_preemptions: int = 0
    retry_after_s: float = 0.0  # with an error that time may cure


class StepOutputs(Wire, frozen=True):
    """All that one engine step produced for one front end. rids[i] gained tokens[i]; a rid may repeat, in order."""

    engine: int
    step: int
    rids: Ids
    tokens: Column
    firsts: list[First] = []
    ends: list[End] = []
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[LogprobRow] = []
    placed: list[int] = []  # rows that enter the batch for the first time; sent before the step that computes them
    returned: list[
        tuple[int, int, float]
    ] = []  # rows given back without an end: (rid, engine for it, seconds it has waited)

    def __post_init__(self) -> None:
        if len(self.rids) != 2 * len(self.tokens) or len(self.tokens) % 4:
            check_columns({"rids": (len(self.rids), 8), "tokens": (len(self.tokens), 4)})


class EngineDown(Wire, frozen=True):
    """Last words of an engine: every row it holds is lost. `error` is the root cause as one sentence."""

    engine: int
    error: str


# ---------------------------------------------------------------- engine core <-> workers


class WorkerInit(Wire, frozen=True):
    """First message to a worker after its Hello. `config` is the resolved EngineConfig as msgpack; `arena` the fd path of
    the shared memory for collectives (empty with one worker), `peers` that of the engines in lock step (empty without)."""

    config: bytes
    dp_rank: int
    worker: int
    arena: str = ""
    peers: str = ""


class LoadProgress(Wire, frozen=True):
    worker: int
    phase: str
    done: int
    total: int


class WorkerLoaded(Wire, frozen=True):
    """Weights are in place. `free_bytes` is what could be given to KV blocks, `block_bytes` what one block costs here."""

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
    """The worker's own exception; it is dying or refuses to go on. `exit_code` is that of its kind."""

    worker: int
    error: str
    hint: str = ""
    traceback: str = ""
    exit_code: int = 1


class NewRow(Wire, frozen=True):
    """A row placed in the persistent batch: everything the worker must know. Also sent when a preempted request resumes."""

    row: int  # slot in the persistent batch, 0..max_num_seqs-1
    tokens: np.ndarray  # int32, all tokens known so far: prompt, then outputs
    num_prompt: int  # how many of them are the user's prompt (penalties tell prompt and output apart)
    params: RowParams
    blocks: list[int]


class StepPlan(Wire, frozen=True):
    """One step: deltas over the persistent batch, applied in the order of the fields."""

    step: int
    freed: list[int]  # rows to forget
    new: list[NewRow]
    grown_rows: Column  # these rows ...
    grown_blocks: Column  # ... got these blocks, in order; not for rows in `new`
    copies: list[tuple[int, int]]  # (source block, destination block), before anything is computed
    rows: Column  # rows computed in this step
    num_tokens: Column  # per scheduled row: tokens computed
    num_computed: Column  # per scheduled row: tokens whose KV is already there
    tokens: Column  # per scheduled row: id sampled since the worker last saw the row; -1: none, or the worker holds it
    sample: Flags  # per scheduled row: its last computed position yields a new token
    ballot: Ballot | None = None  # of engines in lock step; such a plan may have no rows

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
    """A StepPlan, shorter: the rows of the plan before, all of which sampled, each one token further, and nothing else but new
    blocks. `tokens` is that of StepPlan, or empty when it is what the plan before had."""

    step: int
    grown_rows: Column = b""
    grown_blocks: Column = b""
    tokens: Column = b""

    def __post_init__(self) -> None:
        if len(self.grown_rows) != len(self.grown_blocks) or len(self.grown_rows) % 4 or len(self.tokens) % 4:
            check_columns({"grown_rows": (len(self.grown_rows), 4), "grown_blocks": (len(self.grown_blocks), 4)})
            check_columns({"tokens": (len(self.tokens), 4)})


class RowFault(Wire, frozen=True):
    """An error that belongs to one row; its batch-mates are unharmed."""

    row: int
    error: str
    by_request: bool = False  # what the row's own parameters ask for cannot be; nothing has failed


class StepResult(Wire, frozen=True):
    """Answer of the reporting worker. rows[i] sampled tokens[i]; faulted rows are in neither."""

    step: int
    rows: Column
    tokens: Column
    logprobs: list[LogprobRow] = []
    prompt_logprobs: list[LogprobRow] = []  # of prompt tokens start + 1 ... of a chunk [start, stop)
    faults: list[RowFault] = []
    execute_s: float = 0.0
    agreed: Agreed | None = None  # what the ballots of all engines came to

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.tokens) or len(self.rows) % 4:
            check_columns({"rows": (len(self.rows), 4), "tokens": (len(self.tokens), 4)})


# ---------------------------------------------------------------- coordinator


class Load(Wire, frozen=True):
    """An engine's report, sent on change (at most every 20 ms) and every second. `admitted` is the highest ticket seen per
    front end, so a late report never erases a fresh decision."""

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
    finished: int  # rows ended since start


class KVEvents(Wire, frozen=True):
    """Blocks that became findable in an engine, and those that no longer are, since the report before. `reset`: forget what
    you knew. A reader that misses a `seq` asks for everything again (Resync)."""

    engine: int
    epoch: int
    seq: int
    stored: bytes  # keys of 8 bytes
    removed: bytes
    num_blocks: int  # that the engine has: more keys there cannot be
    reset: bool = False

    def __post_init__(self) -> None:
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            raise ValueError(f"{len(self.stored)} and {len(self.removed)} bytes are no keys of {KEY_BYTES} bytes each")


class Resync(Wire, frozen=True):
    """The coordinator asks an engine for all of its blocks: it has missed a report."""

    engine: int


class GiveBack(Wire, frozen=True):
    """The coordinator asks an engine to forget up to `count` rows that never started; their front ends, told by `returned` of
    StepOutputs, send them to engine `to`. Another life of the engine than `epoch` ignores it."""

    engine: int
    epoch: int
    count: int
    to: int


class Route(Wire, frozen=True):
    """Front end asks for an engine. `pin` >= 0 demands that engine."""

    rid: int
    num_tokens: int
    num_choices: int = 1
    pin: int = -1
    label: str = ""  # of the place it comes from: engines with this label are near
    prefix: bytes = b""  # keys of the prompt's first blocks (trireme/hashing.py), where the policy looks at them

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
    in_flight: int = 0  # tickets given and not yet reported as admitted


class View(Wire, frozen=True):
    """Membership and load as the coordinator sees them; front ends keep the last one while it is away."""

    seq: int
    members: list[Member]


class Released(Wire, frozen=True):
    """A front end returns tickets it will not use (its client left before the submit)."""

    engine: int
    epoch: int
    count: int


class WaveOrder(Wire, frozen=True):
    """How far a rank in lock step shall go, as a state and not as a change: a late or repeated one does no harm.
    `number` counts pauses and resumes; the highest one holds."""

    epoch: int  # of the engines it is meant for
    wave: int
    number: int = 0
    mode: Mode = ""


class WaveReport(Wire, frozen=True):
    """How far it is, likewise. `wants`: it is parked with rows that may go on, and needs the next wave."""

    engine: int
    epoch: int
    wave: int
    is_running: bool
    number: int = 0
    mode: Mode = ""
    wants: bool = False


# ---------------------------------------------------------------- supervisor <-> its children, over the boot channel


class Boot(Wire, frozen=True):
    """What a child is told at birth, over an inherited socket, never through argv or the environment."""

    role: Role
    name: str
    epoch: int
    config: bytes  # resolved EngineConfig as msgpack
    config_hash: bytes
    run_dir: str  # private directory of the sockets (mode 0700)
    index: int = 0  # dp rank, front-end number or worker number
    listen_fd: int = -1  # inherited listening socket of the HTTP port
    peers: str = ""  # fd path of the shared memory of engines in lock step
    secret_keys: dict[str, bytes] = {}  # CURVE keys when tcp leaves loopback
    pause: Mode = ""  # that an engine's former life was in


class Progress(Wire, frozen=True):
    source: str
    phase: str
    done: int
    total: int


class Ready(Wire, frozen=True):
    source: str
    facts: dict[str, Any] = {}
    phases: dict[str, float] = {}  # seconds of each part of the start, in order; they add up to all since `began`
    decisions: list[tuple[str, str, str]] = []
    began: float = 0.0  # a reading of time.monotonic


class Failed(Wire, frozen=True):
    """A child's real exception, to be printed once, last, by the parent."""

    source: str
    error: str
    hint: str = ""
    traceback: str = ""
    exit_code: int = 1


class Beat(Wire, frozen=True):
    """A child's main loop turned. Only a child that has sent one is expected to send more."""

    progress: int


class Paused(Wire, frozen=True):
    """An engine that steps alone is in this pause from now on, and so shall be its next life. "": in none."""

    mode: Mode


class Drain(Wire, frozen=True):
    """Finish and leave: take new work for `notice_s` more seconds, then let what runs end within `deadline_s`."""

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

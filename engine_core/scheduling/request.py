"""A sequence inside the engine: its tokens, its blocks, its state.

Created by core on Submit, changed by scheduler and outputs only. Holds no socket, clock or tensor.

    WAITING ----> RUNNING <----> PREEMPTED
       |             |               |
       +-------------+---------------+-----> ENDED
"""

from __future__ import annotations

from array import array
from enum import Enum
from math import inf

import msgspec
import numpy as np

from trireme.engine_core.kv.table import BlockTable
from trireme.engine_core.scheduling.decode_batch import SlotColumns
from trireme.errors import EngineError
from trireme.transport.wire.messages import Submit


class State(Enum):
    """Life-cycle state of a sequence. Members compare by identity."""

    WAITING = "waiting"  # queued, never ran: owns nothing
    RUNNING = "running"  # owns a slot of the persistent batch and blocks
    PREEMPTED = "preempted"  # queued again at its old position: owns nothing, keeps its tokens
    ENDED = "ended"  # its End has been written; blocks used by a step in flight may still be fenced


TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (State.WAITING, State.RUNNING),
        (State.WAITING, State.ENDED),
        (State.RUNNING, State.PREEMPTED),
        (State.RUNNING, State.ENDED),
        (State.PREEMPTED, State.RUNNING),
        (State.PREEMPTED, State.ENDED),
    }
)


class QueueWait(msgspec.Struct, gc=False):
    """How long a sequence may wait here, and what it has waited: set at its submit, read by admission and queue."""

    bound_s: float  # maximum expected wait; 0: unlimited
    due_s: float  # from `Request.arrival_s` to its deadline; 0: none
    may_move: bool  # to another engine: at most once in its life, and before it ran anywhere
    since_busy_s: float = 0.0  # when it was queued, in busy time of this engine (see ServiceRate)

    @classmethod
    def of(cls, submit: Submit) -> QueueWait:
        """The limits that a submit names, counted from its arrival."""
        limits_s = (submit.deadline_s, submit.total_s or submit.deadline_s)
        due_s = min((limit for limit in (submit.deadline_s, submit.total_s) if limit > 0), default=0.0)
        return cls(
            bound_s=0.0 if submit.num_moves else min(limits_s),
            due_s=due_s + submit.waited_s if due_s else 0.0,
            may_move=not submit.stays and submit.num_moves == 0,
        )


class RequestStats(msgspec.Struct, gc=False):
    """What happened to a sequence in this engine, and when. Readings of the engine's clock; -1: not yet."""

    queued_at_s: float
    first_run_s: float = -1.0
    first_token_s: float = -1.0
    num_cached: int = -1  # prompt tokens found in the prefix cache at first admission
    num_scored: int = 0  # prompt positions whose log-probabilities were sent
    num_preemptions: int = 0

    @property
    def queued_s(self) -> float:
        """Seconds in the queue before it first ran."""
        return self.first_run_s - self.queued_at_s

    @property
    def prefill_s(self) -> float:
        """Seconds from its first step to its first token."""
        return self.first_token_s - self.first_run_s


class PolicyAccount(msgspec.Struct, gc=False):
    """What the scheduling policy has noted of a sequence: the service that it received."""

    num_given: int  # tokens of its submit, replayed ones included
    num_paid: int = -1  # tokens known when it was last charged; -1: never
    num_at_start: int = 0  # tokens known when it got its slot
    level: int = -1  # for policies with levels; -1: not set


class Request:
    """One sequence. While it has a slot, per-step state is kept in the scheduler's columns, and `_tokens` may lack the newest
    tokens until `catch_up`. `arrival` is its rank in the order of submits here, kept through preemptions."""

    __slots__ = (
        "_tokens",
        "account",
        "arrival",
        "arrival_s",
        "client",
        "columns",
        "front",
        "itl_target_s",
        "key",
        "limit",
        "num_prompt",
        "params",
        "priority",
        "rid",
        "row",
        "state",
        "stats",
        "stops",
        "table",
        "wait",
    )

    def __init__(
        self, front: str, submit: Submit, arrival: int, now: float, max_len: int, itl_target: float = inf
    ) -> None:
        self.front = front
        self.rid = submit.rid
        self.params = submit.params
        self.client = submit.client
        self.itl_target_s = submit.itl_target_s or itl_target  # seconds between its tokens; infinite: none
        self.priority = submit.priority
        self.arrival = arrival
        self.arrival_s = now - submit.waited_s  # when the client asked, possibly another engine
        self._tokens = array("i", np.ascontiguousarray(submit.prompt, np.int32).tobytes())
        self.num_prompt = len(self._tokens) - submit.num_replayed  # the user's part
        self.limit = min(self.num_prompt + submit.params.max_tokens, max_len)  # tokens at which the sequence ends
        self.stops = frozenset((*submit.params.eos_token_ids, *submit.params.stop_token_ids))
        self.state = State.WAITING
        self.key: tuple[float, ...] = ()  # its queue order, as set by the queue
        self.row = -1
        self.columns: SlotColumns | None = None
        self.table = BlockTable(submit.salt)
        self.wait = QueueWait.of(submit)
        self.account = PolicyAccount(len(self._tokens))
        self.stats = RequestStats(now)

    @property
    def tokens(self) -> array[int]:
        """All known tokens. Change only through `append`."""
        self.catch_up()
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """Number of known tokens."""
        return len(self._tokens) if self.columns is None else int(self.columns.known[self.row])

    def append(self, token: int) -> None:
        """One more token of a sequence with a slot."""
        assert self.columns is not None
        self.tokens.append(token)
        count, tail = len(self._tokens), self.columns.tail
        tail[self.row, (count - 1) % tail.shape[1]] = token
        self.columns.known[self.row] = count

    def catch_up(self) -> None:
        """Copies the tokens that only the columns have."""
        columns = self.columns
        if columns is not None and (lack := int(columns.known[self.row]) - len(self._tokens)):
            start = len(self._tokens) % columns.tail.shape[1]
            self._tokens.frombytes(columns.tail[self.row, start : start + lack].tobytes())

    def take_tail(self, tail: bytes) -> None:
        """`catch_up` for a sequence whose known tokens end with all of `tail`."""
        start = 4 * len(self._tokens) % len(tail)
        if self.columns is not None and self.columns.known[self.row] > len(self._tokens):
            self._tokens.frombytes(tail[start:])

    @property
    def num_computed(self) -> int:
        """Tokens whose KV exists once every plan made so far has run; 0 without a slot."""
        return 0 if self.columns is None else int(self.columns.computed[self.row])

    @num_computed.setter
    def num_computed(self, value: int) -> None:
        assert self.columns is not None
        self.columns.computed[self.row] = value

    @property
    def capacity(self) -> int:
        """Tokens that fit into `blocks`."""
        return 0 if self.columns is None else int(self.columns.capacity[self.row])

    @capacity.setter
    def capacity(self, value: int) -> None:
        assert self.columns is not None
        self.columns.capacity[self.row] = value

    @property
    def last_step(self) -> int:
        """Newest plan with this sequence since it got its slot; 0: none."""
        return 0 if self.columns is None else int(self.columns.last_step[self.row])

    @last_step.setter
    def last_step(self, value: int) -> None:
        assert self.columns is not None
        self.columns.last_step[self.row] = value

    @property
    def num_output(self) -> int:
        """Tokens generated so far, replayed ones included."""
        return self.num_tokens - self.num_prompt

    @property
    def num_left(self) -> int:
        """Known tokens whose KV no plan computes yet."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Has a slot, and all known tokens are planned, so that each step may add one."""
        return self.columns is not None and bool(self.columns.decoding[self.row])

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: not the last one, and none whose prompt log-probabilities are
        still owed."""
        num_scored = self.stats.num_scored
        owes_scores = self.params.prompt_logprobs >= 0 and num_scored < self.num_prompt - 1
        return min(self.num_tokens - 1, num_scored) if owes_scores else self.num_tokens - 1

    def move(self, state: State) -> None:
        """The only way to change state. Raises EngineError naming both states for an illegal transition."""
        if (self.state, state) not in TRANSITIONS:
            raise EngineError(f"sequence {self.front}/{self.rid} cannot go from {self.state.value} to {state.value}")
        self.state = state

    def token_array(self) -> np.ndarray:
        """A copy of all known tokens as int32."""
        return np.array(self.tokens, np.int32)

    def take_slot(self, row: int, columns: SlotColumns) -> None:
        """Takes a batch slot, with nothing computed yet."""
        columns.clear(row, self.limit, self.itl_target_s)
        count = len(self._tokens)
        begun = count % columns.tail.shape[1]
        columns.tail[row, :begun] = self._tokens[count - begun :]
        columns.known[row] = count
        self.row, self.columns = row, columns
        self.account.num_at_start = count

    def forget_kv(self) -> None:
        """Resets to nothing computed; the caller has released the blocks and the slot."""
        if self.columns is not None:
            self.catch_up()
            self.columns.decoding[self.row] = False
            self.columns.known[self.row] = 0
        self.table.clear()
        self.row, self.columns = -1, None

    def __repr__(self) -> str:
        return f"<{self.front}/{self.rid} {self.state.value} {self.num_computed}/{self.num_tokens}>"

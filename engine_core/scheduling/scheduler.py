"""The scheduler: how many tokens each sequence computes in the next step, and which sequences get or lose blocks.

Called by core. A pure state machine: no socket, no tensor, and the clock is an argument. Every request asks for the tokens it
lacks, so prefill, chunks, decode and recomputation are one case; the passes of `schedule` only set the order.

      tokens of a sequence [ in the prefix cache | computed | this step | later steps ]
                           0                     num_computed           len(tokens)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from itertools import chain
from math import inf
from operator import attrgetter

import msgspec
import numpy as np

from trireme.engine_core.kv.cache import KVCache
from trireme.engine_core.scheduling.chunk_budget import ChunkBudget
from trireme.engine_core.scheduling.decode_batch import HELD, NOTHING, DecodeBatch, Mask, SlotColumns, decode_batch_of
from trireme.engine_core.scheduling.pending_step import PendingStep
from trireme.engine_core.scheduling.policies.base import Policy
from trireme.engine_core.scheduling.request import Request, State
from trireme.engine_core.scheduling.waiting import WaitingQueue
from trireme.machine.step_sizes import StepSizes
from trireme.step_time import StepShape, StepTimeModel
from trireme.transport.wire.columns import repeated

CROWD = 2.0  # a soft target is widened when more than 1 / CROWD as many wait for their first token as decode
MOST_OVERTAKING = 8  # queued requests, the head included, that may start before longer prompts are complete

_key = attrgetter("key")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a scheduler, all resolved to numbers. Also sent to frontends (EngineFacts)."""

    max_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_tokens: int
    chunk: int  # max tokens of one sequence per step; 0: never split a prompt that fits one step
    max_waiting: int
    max_waiting_tokens: int
    queue_timeout: float = 0.0
    max_wait: float = 0.0  # seconds of expected queue wait; 0: unlimited
    prefix_cache: bool = True
    itl_target: float = inf  # seconds between tokens of sequences that name none; infinite: prompts fill steps
    most_crowd: float = 1.0  # times `itl_target` that a step may last while many wait for their first token
    decode_steps: float = 2.2  # times what its decoding part takes that a step with prompt tokens may always last
    ttft_target: float = 0.0  # seconds to the first token, above which prompts get more of a step; 0: none
    padded_decodes: tuple[int, ...] = ()  # to which the decoding sequences of steps with prompts are padded, on a GPU


class Scheduler:
    """Queue, running sequences, and steps in flight (at most `depth`, answered in order).

    With `ahead`, a sequence is planned again before its sampled token is known here: the workers keep the token and continue with
    it. Sequences certain to end with the token in flight are excluded; a stop noticed late costs the one token sampled past it.
    """

    def __init__(self, limits: Limits, policy: Policy, depth: int = 1, *, ahead: bool = False) -> None:
        self.limits = limits
        self.policy = policy
        self.depth = depth
        self.ahead = ahead
        self.cache = KVCache(limits.num_blocks, limits.block_size, prefix_cache=limits.prefix_cache)
        self.waiting = WaitingQueue(policy)
        self.columns = SlotColumns(limits.max_num_seqs, limits.block_size)
        self.running: list[Request] = []  # in policy order, as are its two parts:
        self.prefilling: list[Request] = []  # sequences with known tokens to compute
        self.decode_batch = decode_batch_of([])  # sequences that decode
        self.free_rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self.in_flight: deque[PendingStep] = deque()
        self.step = 0  # newest step planned
        self.admits = True  # False: only sequences that have begun continue
        self.num_preemptions = 0
        self._freed: list[int] = []  # batch slots that workers still believe occupied
        self._joining: list[Request] = []  # sequences whose last chunk is planned: they decode next
        self._answered: PendingStep | None = None  # the step whose answer came last
        self._owed = 0  # blocks that partly prefilled sequences still need
        sizes = StepSizes(limits.padded_decodes) if limits.padded_decodes else None
        self.budget = ChunkBudget(StepTimeModel(sizes), limits.max_num_tokens, limits.decode_steps, sizes)

    @property
    def completed(self) -> int:
        """The newest step answered."""
        return self.step - len(self.in_flight)

    @property
    def num_running(self) -> int:
        return self.limits.max_num_seqs - len(self.free_rows)

    def add(self, request: Request) -> None:
        """Queues a request that fits `limits`."""
        self.waiting.push(request)

    def end(self, request: Request) -> None:
        """Removes a request in any state. Blocks of a step in flight stay fenced until that step is answered."""
        if request.state is State.RUNNING:
            self._give_up(request)
        else:
            self.waiting.discard(request)
        request.move(State.ENDED)

    def invalidate(self, request: Request, first_token: int) -> None:
        """What a request computed from `first_token` on may be garbage, and so may anything computed from it: it leaves the index,
        and sequences that adopted it start over; equal content in blocks of their own is valid. The request may have lost its
        slot already, and have been admitted again onto what it had written.

        Equal contents have equal prefixes: any sequence that read some of this has the first of these contents in its own chain.
        """
        first = first_token // self.limits.block_size
        content = request.table.hashes[first : first + 1]
        if not content:
            return
        drafts = [*self.in_flight, *([self._answered] if self._answered else [])]
        rows = {id(row): row for row in chain((request,), self.running, *(pending.requests() for pending in drafts))}
        alike = [row for row in rows.values() if row.table.hashes[first : first + 1] == content]
        for row in alike:
            self.cache.invalidate(row.table.hashes[first:])
        for row in alike:
            if row.table.num_adopted > first:
                self._preempt(row, sound=False)

    @property
    def num_begun(self) -> int:
        """Sequences that have had a slot, now or before a preemption."""
        return len(self.running) + self.waiting.num_preempted

    def schedule_none(self, now: float) -> PendingStep | None:
        """A dummy step for lockstep ranks without work. None while `depth` steps are in flight."""
        if len(self.in_flight) >= self.depth:
            return None
        pending = PendingStep(self.step + 1, now)
        self._send_off(pending)
        return pending

    def complete(self, now: float) -> PendingStep:
        """The oldest step in flight is over: lifts its fence and returns it. The next one starts now."""
        pending = self.in_flight.popleft()
        if self.in_flight:
            self.in_flight[0].started_s = now
        if pending.fenced:
            self.cache.release(pending.fenced)
            pending.fenced = []
        self._answered = pending
        return pending

    def schedule(self, now: float) -> PendingStep | None:
        """Plans the next step, or None when nothing can run now."""
        if len(self.in_flight) >= self.depth or not (self.running or self.waiting):
            return None
        pending = PendingStep(self.step + 1, now)
        self._sort_rows()
        preempted = self._make_room()
        if preempted or self._take_slot():
            self._sort_rows()
        self._decode(pending)
        if self.prefilling or self.waiting:
            self._open_budget(pending, now)
            if self.prefilling:
                self._prefill(pending, now, admits=not preempted)
            if not preempted and self.waiting:
                self._admit(pending, now)
        if not len(pending):
            return self._unblock(now)
        self._send_off(pending)
        return pending

    def _send_off(self, pending: PendingStep) -> None:
        pending.freed, self._freed = self._freed, []
        self.step = pending.step
        self.in_flight.append(pending)

    # ------------------------------------------------------------ passes of one step

    def _sort_rows(self) -> None:
        """Updates `prefilling` and `decode_batch`: sequences have ended, been preempted or begun to decode since the last step."""
        if self.prefilling:
            self.prefilling = [row for row in self.prefilling if not row.is_decoding and row.num_left > 0 <= row.row]
        is_live = self.columns.decoding[self.decode_batch.slots]
        if np.count_nonzero(is_live) < len(is_live):
            self.decode_batch = self.decode_batch.where(is_live)
        if self._joining:
            joining = sorted((row for row in self._joining if row.is_decoding), key=_key)
            self._joining = []
            if joining and len(self.decode_batch) and joining[0].key < self.decode_batch.requests[-1].key:
                self.decode_batch = decode_batch_of(sorted([*self.decode_batch.requests, *joining], key=_key))
            elif joining:
                self.decode_batch = self.decode_batch.plus(joining)

    def _decode(self, pending: PendingStep) -> None:
        """Plans one token for every sequence that has one to compute. Array operations: almost every sequence is in every step."""
        decode_batch, columns = self.decode_batch, self.columns
        mask = self._who_decodes(decode_batch)
        if mask is not None:
            decode_batch = decode_batch.where(mask)
        if not len(decode_batch):
            return
        slots = decode_batch.slots
        at = columns.computed[slots]
        full = (at == columns.capacity[slots]).nonzero()[0]
        if full.size:
            rows = slots[full]
            columns.capacity[rows] += self.limits.block_size
            pending.grown_rows += rows.tolist()
            pending.grown_blocks += self.cache.extend_each(decode_batch.requests[full], full.size)
        pending.decode(
            decode_batch, at, repeated(HELD, len(decode_batch)) if self.ahead else columns.token[slots].tobytes()
        )
        columns.computed[slots] = at + 1
        columns.last_step[slots] = pending.step
        if self.ahead:
            columns.decoding[slots] = at + 2 < columns.limit[slots]
        else:
            columns.token[slots] = NOTHING

    def _who_decodes(self, decode_batch: DecodeBatch) -> Mask | None:
        """The sequences whose token the workers can compute within budget and blocks, in policy order. None: all."""
        columns, slots = self.columns, decode_batch.slots
        num_parts = 1 if self.ahead else self.depth  # steps over which pipeline stages spread the decoding sequences
        room = min(self.limits.max_num_tokens, -(-len(self.running) // num_parts))
        if self.ahead and len(decode_batch) <= min(room, self.cache.num_available):
            return None
        mask: Mask = columns.token[slots] != NOTHING
        if self.cache.num_available < len(decode_batch):
            full = mask & (columns.computed[slots] == columns.capacity[slots])
            mask &= ~(full & (np.cumsum(full) > self.cache.num_available))
        if room < len(decode_batch):
            mask &= np.cumsum(mask) <= room
        return None if mask.all() else mask

    def _open_budget(self, pending: PendingStep, now: float) -> None:
        """Sizes the step for prompts. Only for steps that may have some."""
        rows, target_s = len(pending.at), inf
        if self.limits.chunk:
            target_s = min(self.tightest_target(pending.decode_batch), self.budget.peers_target_s)
        is_own = target_s == self.limits.itl_target and self.budget.peers_target_s == inf  # lockstep ranks choose alike
        if self.limits.most_crowd > 1.0 and rows and is_own:
            num_waiting = len(self.prefilling) + min(len(self.waiting), len(self.free_rows))
            target_s *= min(self.limits.most_crowd, max(1.0, CROWD * num_waiting / rows))
        late = self.budget.agreed_late or (self.lateness(now) if target_s < inf else 1.0)
        context = int(pending.at.sum()) if target_s < inf else 0
        self.budget.open(StepShape(rows, context), target_s, late)
        pending.bound_s = self.budget.bound_s
        cache = self.cache
        self._owed = sum(cache.blocks_for(row.num_tokens) - len(row.table.blocks) for row in self.prefilling)

    def tightest_target(self, decode_batch: DecodeBatch | None) -> float:
        """The least seconds between tokens that any of these sequences asks for; infinite: none does."""
        if decode_batch is None or not len(decode_batch):
            return inf
        return float(self.columns.itl_target[decode_batch.slots].min())

    @property
    def misses_targets(self) -> bool:
        """Prompts wait longer than their target although steps exceed that of the streams."""
        return self.budget.is_late and bool(self.waiting or self.prefilling)

    def lateness(self, now: float) -> float:
        """The longest wait for a first token over its target, at least 1."""
        limit_s = self.limits.ttft_target
        return max(1.0, self._longest_wait(now) / limit_s) if limit_s else 1.0

    def _longest_wait(self, now: float) -> float:
        """Seconds since the client asked, of the longest wait for a first token."""
        rows = [row for row in self.prefilling if row.stats.first_token_s < 0]
        if (head := self.waiting.peek()) is not None:
            rows.append(head)
        return max((now - row.arrival_s for row in rows), default=0.0)

    def _prefill(self, pending: PendingStep, now: float, *, admits: bool) -> None:
        """Plans chunks of the running sequences that have known tokens to compute, and of queued ones that go before them. A
        request that overtakes the head of the queue leaves it a slot and its blocks."""
        order = self.prefilling
        if self.policy.shortest_first and sum(row.num_left for row in order) > self.budget.tokens_left // 2:
            queued = self.waiting.first(MOST_OVERTAKING) if admits and self.admits and self.free_rows else []
            if len(order) + len(queued) > 1:
                order = sorted([*order, *queued], key=lambda row: _response_ratio(row, now), reverse=True)
        head = self.waiting.peek()
        for request in order:
            if request.state is State.RUNNING:
                self._continue(pending, request)
            elif request is head or head is None:
                admits, head = admits and self._try_start(pending, request, now), None
            elif admits and len(self.free_rows) > 1:
                self._try_start(pending, request, now, reserve=self.cache.blocks_for(head.num_tokens))

    def _continue(self, pending: PendingStep, request: Request) -> None:
        """Plans the next chunk of a running sequence, within its blocks and the budget."""
        num_tokens = self._chunk(request.num_left, request.num_computed)
        spare = request.capacity - request.num_computed + self.cache.num_available * self.limits.block_size
        num_tokens = min(num_tokens, spare)
        if num_tokens <= 0:
            return
        missing = self.cache.blocks_for(request.num_computed + num_tokens) - len(request.table.blocks)
        if missing > 0:
            pending.grow(request.row, self.cache.extend(request, missing))
            self._owed -= missing
        self._plan(pending, request, num_tokens)

    def _admit(self, pending: PendingStep, now: float) -> None:
        """Starts queued requests in order while slots, budget and blocks last. The head is not overtaken for want of blocks."""
        if self.policy.is_metered and self.free_rows:
            self.policy.settle(self.running)
        while (request := self._next_waiting()) is not None:
            if not self._try_start(pending, request, now):
                return

    def _try_start(self, pending: PendingStep, request: Request, now: float, reserve: int = 0) -> bool:
        """Starts a queued request if there are a slot, budget and blocks for it, besides `reserve` blocks for others.

        It needs blocks for all its known tokens, beyond those that partly prefilled sequences still need: so only decoding
        can run out of blocks. A preempted request must find more than that, or it would be preempted again at once.
        """
        cache = self.cache
        if not self.free_rows or self._chunk(1, 0) < 1:
            return False
        spare = cache.num_available - self._owed - reserve
        if spare < 1:
            return False
        hits = cache.match(request)
        num_cached = len(hits) * self.limits.block_size
        num_tokens = self._chunk(request.num_tokens - num_cached, num_cached)
        needed = cache.blocks_for(request.num_tokens) - len(hits)
        margin = 0
        if request.state is State.PREEMPTED and self.running:
            margin = needed // 4 + len(self.running)
        if num_tokens < 1 or spare - cache.num_idle(hits) < needed + margin:
            return False
        if request.state is State.WAITING:
            pending.placed.append(request)
        self._start(request, hits, now)
        cache.extend(request, cache.blocks_for(request.num_computed + num_tokens) - len(hits))
        self._plan(pending, request, num_tokens)
        pending.place(request)
        self._owed += cache.blocks_for(request.num_tokens) - len(request.table.blocks)
        return True

    def _next_waiting(self) -> Request | None:
        if self.admits or not self.waiting.num_preempted:
            return self.waiting.peek() if self.admits else None
        begun = (row for row in self.waiting if row.state is State.PREEMPTED)
        return min(begun, key=_key, default=None)

    def _start(self, request: Request, hits: list[int], now: float) -> None:
        """Moves a request from the queue to running, with a slot and the matched prefix."""
        self.waiting.discard(request)
        request.move(State.RUNNING)
        request.take_slot(self.free_rows.pop(), self.columns)
        self.cache.adopt(request, hits)
        if request.stats.num_cached < 0:
            request.stats.num_cached = min(request.num_computed, request.num_prompt)
            request.stats.first_run_s = now
        if self.policy.is_metered:
            self.policy.settle((request,))
        insort(self.running, request, key=_key)
        insort(self.prefilling, request, key=_key)

    def _plan(self, pending: PendingStep, request: Request, num_tokens: int) -> None:
        """Adds a sequence to the pending step; its full blocks can be shared from this step on."""
        sample = num_tokens == request.num_left and request.num_output < request.params.max_tokens
        self.budget.take(num_tokens, request.num_computed)
        pending.add(request, num_tokens, sample=sample)
        self.cache.seal(request)
        if sample and not (self.ahead and request.num_tokens + 1 >= request.limit):
            self.columns.decoding[request.row] = True
            self.columns.token[request.row] = HELD if self.ahead else NOTHING
            self._joining.append(request)

    def _chunk(self, num_left: int, start: int) -> int:
        """How many of `num_left` tokens of one sequence, the first at position `start`, fit into the pending step."""
        limits = self.limits
        if limits.chunk:
            return self.budget.room(min(num_left, limits.chunk), start)
        budget = self.budget.tokens_left
        if budget < num_left <= limits.max_num_tokens:
            return 0
        return min(num_left, budget)

    def _take_slot(self) -> bool:
        """Frees a slot for the head of the queue if the policy says so. True if a sequence lost it."""
        if not self.policy.takes_slots or self.free_rows or not self.admits or (head := self.waiting.peek()) is None:
            return False
        rows = [row for row in self._preemptible() if self.policy.is_spent(row, head)]
        if not rows:
            return False
        row = self.policy.victim(rows, self.cache.work_lost)
        self.policy.demote(row)
        self._preempt(row)
        return True

    # ------------------------------------------------------------ blocks running out

    def _make_room(self) -> bool:
        """Preempts until every sequence about to decode into a new block can have one. True if any was preempted."""
        cache = self.cache
        if cache.num_available >= len(self.running):
            return False
        preempted = False
        while True:
            if self._num_needing() <= cache.num_available + self._num_promised():
                return preempted
            candidates = self._preemptible()
            if len(candidates) < 2 and (self.in_flight or not candidates):
                return preempted  # a step in flight will release blocks; the sequences left over skip this step
            self._preempt(self.policy.victim(candidates, cache.work_lost))
            preempted = True

    def _preemptible(self) -> list[Request]:
        """Running sequences that may be preempted now: with `ahead` all, else those in no step in flight."""
        newest = self.step if self.ahead else self.completed
        return [row for row in self.running if row.last_step <= newest]

    def _num_needing(self) -> int:
        """Number of sequences about to decode into a block that they do not have."""
        columns = self.columns
        slots = self.decode_batch.slots
        needing = columns.decoding[slots] & (columns.token[slots] != NOTHING)
        needing &= columns.computed[slots] == columns.capacity[slots]
        return int(np.count_nonzero(needing))

    def _num_promised(self) -> int:
        """Blocks that the steps in flight will release. Only sequences planned ahead are preempted before their step is over."""
        if not self.ahead:
            return 0
        counts = self.cache.pool.counts
        return sum(counts[block] == 1 for pending in self.in_flight for block in pending.fenced)

    def _unblock(self, now: float) -> PendingStep | None:
        """Nothing could be planned. With no step in flight a sequence must be preempted, or the engine would make no progress."""
        if self.in_flight or not self.running:
            return None
        self._preempt(self.policy.victim(self.running, self.cache.work_lost))
        return self.schedule(now)

    def _preempt(self, request: Request, *, sound: bool = True) -> None:
        """Moves a running request back to its old position in the queue, to be recomputed."""
        self._give_up(request, sound=sound)
        request.stats.num_preemptions += 1
        self.num_preemptions += 1
        request.move(State.PREEMPTED)
        self.waiting.push(request)

    def _give_up(self, request: Request, *, sound: bool = True) -> None:
        """Takes slot and blocks from a running sequence and removes it from the steps in flight, whose blocks are fenced. Others
        may find what it has computed, if that is `sound` (valid)."""
        if sound:
            self.cache.seal(request)
        if self.policy.is_metered:
            self.policy.settle((request,))
        for pending in self.in_flight:
            pending.dropped.add(request.row)
        if self._answered is not None:
            self._answered.dropped.add(request.row)
        if request.last_step > self.completed:
            newest = self.in_flight[request.last_step - self.completed - 1]
            newest.fenced += request.table.blocks
        else:
            self.cache.release(request.table.blocks)
        del self.running[bisect_left(self.running, request.key, key=_key)]
        self._freed.append(request.row)
        self.free_rows.append(request.row)
        request.forget_kv()


def _response_ratio(request: Request, now: float) -> tuple[float, ...]:
    """Order of prompts within a step: highest response ratio next (Brinch Hansen, 1971), (waited + left) / left. Short prompts go
    first, and none waits for ever, since its ratio grows."""
    num_left = max(1, request.num_left)
    return ((now - request.arrival_s) / num_left, -num_left, -request.arrival)

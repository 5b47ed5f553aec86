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
from operator import attrgetter

import msgspec
import numpy as np

from trireme.engine_core.kv.cache import KVCache
from trireme.engine_core.scheduling.decode_batch import HELD, NOTHING, DecodeBatch, Mask, SlotColumns, decode_batch_of
from trireme.engine_core.scheduling.pending_step import PendingStep
from trireme.engine_core.scheduling.policies.base import Policy
from trireme.engine_core.scheduling.request import Request, State
from trireme.engine_core.scheduling.waiting import WaitingQueue
from trireme.transport.wire.columns import repeated

SHORT_PART = 4  # of a step: a prompt of at most this fraction need not wait for a long one

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
        self._prefill_all(pending, admits=not preempted)
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

    def _prefill_all(self, pending: PendingStep, *, admits: bool) -> None:
        """Plans chunks of the running sequences that have known tokens to compute, in order. If they do not all fit, a long prompt
        leaves up to half of the step to short prompts behind it (at most a quarter of a step each), which would otherwise wait for
        all its chunks. So it takes at most twice its time, and only while short ones arrive."""
        if not self.prefilling:
            return
        budget = self.limits.max_num_tokens - pending.total_tokens
        short, kept = budget // SHORT_PART, 0
        if self.limits.chunk and sum(row.num_left for row in self.prefilling) > budget:
            kept = sum(row.num_left for row in self.prefilling[1:] if row.num_left <= short)
            if admits and self._can_start_short(short):
                kept += self.waiting.num_tokens
            kept = min(kept, budget // 2)
        for request in self.prefilling:
            if request.num_left <= short:
                kept = max(0, kept - request.num_left)
                self._prefill(pending, request)
            else:
                self._prefill(pending, request, kept)

    def _can_start_short(self, short: int) -> bool:
        """Whether the head of the queue has a short prompt, and lacks only token budget."""
        if not self.free_rows or not self.admits or (head := self.waiting.peek()) is None:
            return False
        if head.state is not State.WAITING or head.num_tokens > short:
            return False
        cache = self.cache
        owed = sum(cache.blocks_for(row.num_tokens) - len(row.table.blocks) for row in self.prefilling)
        return cache.num_available - owed >= cache.blocks_for(head.num_tokens)

    def _prefill(self, pending: PendingStep, request: Request, kept: int = 0) -> None:
        """Plans the next chunk of a running sequence, within its blocks and the budget less the tokens `kept` for others."""
        num_tokens = min(
            self._chunk(pending, request.num_left), self.limits.max_num_tokens - pending.total_tokens - kept
        )
        spare = request.capacity - request.num_computed + self.cache.num_available * self.limits.block_size
        num_tokens = min(num_tokens, spare)
        if num_tokens <= 0:
            return
        missing = self.cache.blocks_for(request.num_computed + num_tokens) - len(request.table.blocks)
        if missing > 0:
            pending.grow(request.row, self.cache.extend(request, missing))
        self._plan(pending, request, num_tokens)

    def _admit(self, pending: PendingStep, now: float) -> None:
        """Starts queued requests in order while slots, budget and blocks last. The head is never overtaken.

        A request needs blocks for all its known tokens, beyond those that partly prefilled sequences still need: so only decoding
        can run out of blocks. A preempted request must find more than that, or it would be preempted again at once.
        """
        cache = self.cache
        if self.policy.is_metered and self.free_rows:
            self.policy.settle(self.running)
        owed = sum(cache.blocks_for(row.num_tokens) - len(row.table.blocks) for row in self.prefilling)
        while self.free_rows and (request := self._next_waiting()) is not None:
            spare = cache.num_available - owed
            if spare < 1 or self._chunk(pending, 1) < 1:
                return
            hits = cache.match(request)
            num_left = request.num_tokens - len(hits) * self.limits.block_size
            num_tokens = self._chunk(pending, num_left)
            needed = cache.blocks_for(request.num_tokens) - len(hits)
            margin = 0
            if request.state is State.PREEMPTED and self.running:
                margin = needed // 4 + len(self.running)
            if num_tokens < 1 or spare - cache.num_idle(hits) < needed + margin:
                return
            if request.state is State.WAITING:
                pending.placed.append(request)
            self._start(request, hits, now)
            cache.extend(request, cache.blocks_for(request.num_computed + num_tokens) - len(hits))
            self._plan(pending, request, num_tokens)
            pending.place(request)
            owed += cache.blocks_for(request.num_tokens) - len(request.table.blocks)

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
        pending.add(request, num_tokens, sample=sample)
        self.cache.seal(request)
        if sample and not (self.ahead and request.num_tokens + 1 >= request.limit):
            self.columns.decoding[request.row] = True
            self.columns.token[request.row] = HELD if self.ahead else NOTHING
            self._joining.append(request)

    def _chunk(self, pending: PendingStep, num_left: int) -> int:
        """How many of `num_left` tokens of one sequence fit into the pending step."""
        limits = self.limits
        budget = limits.max_num_tokens - pending.total_tokens
        if limits.chunk:
            return min(num_left, limits.chunk, budget)
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

"""EngineCore: one engine as a pure state machine. Events in (submit, abort, result, tick), plans and outputs out.

Driven by main (sockets, clock) and by tests (neither). Errors that belong to one request end that request; an EngineError out of a
method means that the engine as a whole is beyond repair.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import compress
from operator import call

import msgspec
import numpy as np

from engine_core.columns import Cohort
from engine_core.intake import check_submit
from engine_core.integrity import Audit, IntegrityError, audit, check_idle
from engine_core.outputs import Outbox, end_reason
from engine_core.plan import Draft
from engine_core.policy import find_policy
from engine_core.request import Request, State
from engine_core.scheduler import Limits, Scheduler
from transport.messages import (
    End,
    EndReason,
    EngineFacts,
    Load,
    LogprobRow,
    RowFault,
    StepOutputs,
    StepPlan,
    StepResult,
    Submit,
)
from trireme.errors import EngineError, OverloadedError, TriremeError


class Counters(msgspec.Struct):
    """Totals since start. At every quiet point submitted = stop + length + abort + error + live requests."""

    submitted: int = 0
    stop: int = 0
    length: int = 0
    abort: int = 0
    error: int = 0
    refused: int = 0  # of the errors: never queued, or timed out in the queue
    row_faults: int = 0  # of the errors
    duplicates: int = 0  # submits under a rid that is live: ignored
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0


class EngineCore:
    """`depth` plans may be in flight; with `ahead`, plans count on tokens that are still being sampled (see Scheduler).
    With `check` every event is followed by a full audit (slow, for tests)."""

    def __init__(
        self,
        limits: Limits,
        *,
        engine: int = 0,
        epoch: int = 0,
        depth: int = 1,
        ahead: bool = False,
        check: bool = False,
        policy: str = "fcfs",
    ) -> None:
        self.limits = limits
        self.engine = engine
        self.epoch = epoch
        self.check = check
        self.scheduler = Scheduler(limits, find_policy(policy), depth, ahead=ahead)
        self.requests: dict[tuple[str, int], Request] = {}
        self.outbox = Outbox(engine)
        self.counters = Counters()
        self.draining = False
        self._arrivals = 0
        self._admitted: dict[str, int] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._loads = 0

    # ------------------------------------------------------------ events

    def submit(self, front: str, submit: Submit, now: float) -> None:
        """Queues a row, or ends it at once with the reason. Never raises for what the caller did."""
        self._admitted[front] = max(submit.ticket, self._admitted.get(front, 0))
        if (front, submit.rid) in self.requests:
            self.counters.duplicates += 1
            return
        self.counters.submitted += 1
        try:
            check_submit(submit, self.limits)
            self._check_capacity(submit)
        except TriremeError as error:
            self._refuse(front, submit.rid, error)
        else:
            self._enqueue(front, submit, now)
        self._after_event()

    def abort(self, front: str, rids: Sequence[int]) -> None:
        """Ends rows of a front end; unknown ids are those that have just ended by themselves."""
        for rid in rids:
            request = self.requests.get((front, rid))
            if request is not None:
                self._end(request, "abort")
        self._after_event()

    def front_gone(self, front: str) -> None:
        """A front end died: its rows end and nobody is told."""
        for request in [row for row in self.requests.values() if row.front == front]:
            self._end(request, "abort")
        self.outbox.drop(front)
        self._admitted.pop(front, None)
        self._after_event()

    def tick(self, now: float) -> None:
        """Ends rows that have waited too long for their first step."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if request.state is State.WAITING:
                waited = now - request.arrival_s
                error = OverloadedError(f"no place in the batch within {waited:.1f} s of waiting")
                self.counters.refused += 1
                self._end(request, "error", error=error)
        self._after_event()

    def on_result(self, result: StepResult, now: float) -> None:
        """Applies the answer to the oldest plan in flight. Raises EngineError when it does not fit that plan."""
        scheduler = self.scheduler
        if not scheduler.in_flight or scheduler.in_flight[0].step != result.step:
            expected = scheduler.in_flight[0].step if scheduler.in_flight else "none"
            raise EngineError(f"the workers answered step {result.step}; the oldest one in flight is {expected}")
        draft = scheduler.complete(now)
        self.counters.steps += 1
        in_order = result.rows == draft.asking_rows() and len(result.tokens) == len(result.rows)
        if not in_order or result.faults or result.prompt_logprobs or result.logprobs:
            self._on_rare(draft, result)
        if in_order:
            if draft.cohort is not None:
                self._on_cohort(draft, draft.cohort, result.tokens[: len(draft.at)])
            self._on_tokens(draft, result, len(draft.at), now)
        else:
            self._on_tokens(draft, result, 0, now)
        if not all(draft.sample):
            self._end_scored(draft, now)
        self._after_event()

    def next_plan(self, now: float) -> StepPlan | None:
        """The next step to run, or None when there is nothing to do or `depth` plans are in flight."""
        draft = self.scheduler.schedule(now)
        if draft is None:
            return None
        self._after_event()
        return draft.to_message()

    # ------------------------------------------------------------ what comes out

    def take_outputs(self) -> dict[str, StepOutputs]:
        """Everything since the last call, one message per front end."""
        return self.outbox.take(self.scheduler.completed) if self.outbox.fronts else {}

    @property
    def is_idle(self) -> bool:
        """No live request and no step in flight."""
        return not self.requests and not self.scheduler.in_flight

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next (or a moment before)."""
        return self._deadlines[0][0] if self._deadlines else None

    def oldest_step_s(self) -> float | None:
        """When the oldest plan in flight was made, or the one before it ended; a stuck worker shows here."""
        return self.scheduler.in_flight[0].started_s if self.scheduler.in_flight else None

    def stats(self, now: float) -> Load:
        scheduler = self.scheduler
        waiting = scheduler.waiting
        self._loads += 1
        return Load(
            engine=self.engine,
            epoch=self.epoch,
            seq=self._loads,
            progress=self.counters.steps,
            num_waiting=len(waiting),
            num_running=len(scheduler.running),
            waiting_tokens=waiting.num_tokens,
            running_tokens=sum(len(row.tokens) for row in scheduler.running),
            blocks_used=self.limits.num_blocks - scheduler.cache.num_available,
            num_blocks=self.limits.num_blocks,
            oldest_wait_s=max((now - row.arrival_s for row in waiting), default=0.0),
            admitted=dict(self._admitted),
            finished=self.counters.submitted - len(self.requests),
        )

    def facts(self) -> EngineFacts:
        limits = self.limits
        return EngineFacts(
            engine=self.engine,
            max_len=limits.max_len,
            vocab_size=limits.vocab_size,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_waiting=limits.max_waiting,
            max_waiting_tokens=limits.max_waiting_tokens,
        )

    def audit(self) -> Audit:
        """Checks every conservation law. Raises IntegrityError."""
        counts = audit(self.scheduler, self.requests)
        self._check_totals()
        return counts

    def check_idle(self) -> None:
        """The same for an idle engine, cheaply. Raises IntegrityError."""
        check_idle(self.scheduler)
        self._check_totals()

    def _check_totals(self) -> None:
        totals = self.counters
        ended = totals.stop + totals.length + totals.abort + totals.error
        if totals.submitted != ended + len(self.requests):
            raise IntegrityError(f"{totals.submitted} submitted, but {ended} ended and {len(self.requests)} live")

    def reset_prefix_cache(self) -> int:
        """Forgets all cached prefixes; returns how many blocks were known. Running rows keep theirs."""
        pool = self.scheduler.cache.pool
        known = len(pool.index)
        pool.forget_all()
        self._after_event()
        return known

    # ------------------------------------------------------------ submit

    def _check_capacity(self, submit: Submit) -> None:
        waiting, limits = self.scheduler.waiting, self.limits
        if self.draining:
            raise OverloadedError("this engine is shutting down")
        if len(waiting) >= limits.max_waiting:
            raise OverloadedError(f"{len(waiting)} requests are queued already; the limit is {limits.max_waiting}")
        num_tokens = waiting.num_tokens + len(submit.prompt)
        if waiting and num_tokens > limits.max_waiting_tokens:
            raise OverloadedError(
                f"{num_tokens} prompt tokens would be queued; the limit is {limits.max_waiting_tokens}"
            )

    def _enqueue(self, front: str, submit: Submit, now: float) -> None:
        self._arrivals += 1
        request = Request(front, submit, self._arrivals, now, self.limits.max_len)
        self.requests[front, submit.rid] = request
        self.counters.prompt_tokens += request.num_prompt
        self.scheduler.add(request)
        if request.num_output >= submit.params.max_tokens > 0:
            self._end(request, "length")  # a replayed row that had all its tokens
            return
        limits = [limit for limit in (self.limits.queue_timeout, submit.deadline_s) if limit > 0]
        if limits:
            heapq.heappush(self._deadlines, (now + min(limits), request.arrival, request))
            self._drop_met_deadlines()

    def _drop_met_deadlines(self) -> None:
        """Keeps the heap about as long as the queue: rows that started or ended need no timer."""
        if len(self._deadlines) > 2 * len(self.scheduler.waiting) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is State.WAITING]
            heapq.heapify(self._deadlines)

    def _refuse(self, front: str, rid: int, error: TriremeError) -> None:
        self.counters.error += 1
        self.counters.refused += 1
        self.outbox.to(front).ends.append(End(rid, "error", error=error.message, error_code=error.code))

    # ------------------------------------------------------------ results

    def _check_complete(self, draft: Draft, places: dict[int, int], result: StepResult) -> None:
        """Every sampling row is answered exactly once, with a token or a fault."""
        answered = {*result.rows, *(fault.row for fault in result.faults)}
        expected = {row for row, sample in zip(draft.rows, draft.sample, strict=True) if sample}
        named = len(result.rows) + len(result.faults)
        if (
            not (expected <= answered <= places.keys())
            or len(answered) != named
            or len(result.rows) != len(result.tokens)
        ):
            raise EngineError(
                f"step {result.step} asked for tokens of {len(expected)} rows; the worker named {named}: "
                f"missing {sorted(expected - answered)[:8]}, unknown {sorted(answered - places.keys())[:8]}"
            )

    def _on_fault(self, draft: Draft, places: dict[int, int], fault: RowFault) -> None:
        """Ends one row. What it wrote in this step may be garbage: nobody may find or go on reading it."""
        place = places[fault.row]
        request = draft.requests[place]
        if fault.row not in draft.dropped:
            self.counters.row_faults += 1
            self._end(request, "error", error=EngineError(f"this request failed in the model: {fault.error}"))
        self.scheduler.distrust(request, draft.num_computed[place])

    def _on_rare(self, draft: Draft, result: StepResult) -> None:
        """Faults and log-probabilities, and whether an unusual answer fits the plan."""
        places = dict(zip(draft.rows, range(len(draft.rows)), strict=True))
        self._check_complete(draft, places, result)
        for fault in result.faults:
            self._on_fault(draft, places, fault)
        for scores in result.prompt_logprobs:
            self._on_scores(draft, places, scores)
        for scores in result.logprobs:
            self._on_logprobs(draft, places, scores)

    def _on_cohort(self, draft: Draft, cohort: Cohort, tokens: list[int]) -> None:
        """One token for each decoding row, in order. Column by column: this sees every row in every step."""
        at = draft.at
        if draft.dropped:
            kept = ~np.isin(cohort.slots, list(draft.dropped))
            cohort, at, tokens = cohort.where(kept), at[kept], list(compress(tokens, kept.tolist()))
        if not cohort:
            return
        scheduler = self.scheduler
        deque(map(call, cohort.appends, tokens), maxlen=0)
        if not scheduler.ahead:
            scheduler.columns.token[cohort.slots] = tokens
        if scheduler.cache.prefix_cache:
            num_full, rest = np.divmod(at + 1, self.limits.block_size)
            full = np.flatnonzero(rest == 0)
            for i, count in zip(full.tolist(), num_full[full].tolist(), strict=True):
                scheduler.cache.seal_next(cohort.requests[i], count)
        self.outbox.add(cohort, tokens)
        self.counters.output_tokens += len(tokens)
        ends = np.flatnonzero(at + 2 >= scheduler.columns.limit[cohort.slots]).tolist()
        if not cohort.stops.isdisjoint(tokens):
            ends = sorted({*ends, *(i for i, token in enumerate(tokens) if token in cohort.stops)})
        for i in ends:
            self._end_if_over(cohort.requests[i], tokens[i])

    def _on_tokens(self, draft: Draft, result: StepResult, first: int, now: float) -> None:
        """The same for the rows of a step from place `first` on, one by one: most of them have finished their prompt."""
        if first == len(draft.rows):
            return
        requests = dict(zip(draft.rows[first:], draft.requests[first:], strict=True))
        for row, token in zip(result.rows[first:], result.tokens[first:], strict=True):
            if row in draft.dropped:
                continue
            request = requests[row]
            request.tokens.append(token)
            if not self.scheduler.ahead:
                self.scheduler.columns.token[row] = token
            outputs = self.outbox.to(request.front)
            outputs.rids.append(request.rid)
            outputs.tokens.append(token)
            self.counters.output_tokens += 1
            if request.first_token_s < 0:
                self._on_first(request, now)
            self._end_if_over(request, token)

    def _end_if_over(self, request: Request, token: int) -> None:
        """The stop rules, for a row that has just got `token`."""
        reason = end_reason(request, token)
        if reason is not None:
            self._end(request, reason, stop_token=token if reason == "stop" else -1)

    def _on_first(self, request: Request, now: float) -> None:
        request.first_token_s = now
        self.counters.cached_tokens += request.num_cached
        self.outbox.first(request)

    def _on_logprobs(self, draft: Draft, places: dict[int, int], scores: LogprobRow) -> None:
        if scores.rid not in draft.dropped:
            request = draft.requests[places[scores.rid]]
            outputs = self.outbox.to(request.front)
            outputs.logprobs.append(LogprobRow(request.rid, scores.token_ids, scores.logprobs, scores.ranks))

    def _on_scores(self, draft: Draft, places: dict[int, int], scores: LogprobRow) -> None:
        """Prompt log-probabilities of a chunk: those computed again after a preemption are cut off."""
        place = places[scores.rid]
        request = draft.requests[place]
        if scores.rid in draft.dropped:
            return
        start = draft.num_computed[place]
        skip = max(0, request.num_scored - start)
        count = len(scores.ranks)
        if skip < count:
            columns = (scores.token_ids[skip:], scores.logprobs[skip:], scores.ranks[skip:])
            fresh = LogprobRow(request.rid, *(np.ascontiguousarray(column) for column in columns))
            self.outbox.to(request.front).prompt_logprobs.append(fresh)
            request.num_scored = start + count

    def _end_scored(self, draft: Draft, now: float) -> None:
        """Rows that generate nothing end with their last prompt chunk."""
        for request, row, sample in zip(draft.requests, draft.rows, draft.sample, strict=True):
            if sample or row in draft.dropped:
                continue
            if request.num_left == 0 and request.last_step == draft.step:
                self._on_first(request, now)
                self._end(request, "length")

    # ------------------------------------------------------------ ends

    def _end(
        self, request: Request, reason: EndReason, *, stop_token: int = -1, error: TriremeError | None = None
    ) -> None:
        """The one way out of a live request."""
        self.scheduler.end(request)
        del self.requests[request.front, request.rid]
        setattr(self.counters, reason, getattr(self.counters, reason) + 1)
        self.outbox.to(request.front).ends.append(
            End(
                request.rid,
                reason,
                stop_token=stop_token,
                error=error.message if error else "",
                error_code=error.code if error else "",
                num_preemptions=request.num_preemptions,
            )
        )

    def _after_event(self) -> None:
        if self.check:
            self.audit()

"""EngineCore: one engine as a pure state machine. Events in (submit, abort, result, tick), plans and outputs out.

Driven by main (sockets, clock) and by tests (neither). Errors that belong to one request end that request; an EngineError raised by
a method means that the whole engine is beyond repair.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain
from math import inf

import msgspec
import numpy as np

from trireme.engine_core.integrity import Audit, IntegrityError, audit, check_idle
from trireme.engine_core.kv.events import BlockLog
from trireme.engine_core.outputs import Outbox, end_reason
from trireme.engine_core.scheduling.admission import QueueAdmission
from trireme.engine_core.scheduling.decode_batch import DecodeBatch, Ints
from trireme.engine_core.scheduling.pending_step import PendingStep, PlannedTokens
from trireme.engine_core.scheduling.policies.base import POLICIES, PolicySettings
from trireme.engine_core.scheduling.request import Request, State
from trireme.engine_core.scheduling.scheduler import Limits, Scheduler
from trireme.engine_core.stall import StepTimes
from trireme.engine_core.validate import check_submit
from trireme.errors import DeadlineError, EngineError, OverloadedError, RequestError, TriremeError
from trireme.transport.wire.columns import unpack
from trireme.transport.wire.messages import (
    End,
    EndReason,
    EngineFacts,
    KVEvents,
    Load,
    LogprobRow,
    RowFault,
    StepOutputs,
    StepPlan,
    StepResult,
    Submit,
)

# Shorter steps without a prompt teach the model of step times only now and then, one of SAMPLED: teaching takes time too.
LONG_S, SAMPLED = 0.005, 8


class Counters(msgspec.Struct):
    """Totals since start. Between events, submitted = stop + length + abort + error + returned + live requests."""

    submitted: int = 0
    stop: int = 0
    length: int = 0
    abort: int = 0
    error: int = 0
    returned: int = 0  # returned to their frontends before they started
    refused: int = 0  # of the errors: never queued, or timed out in the queue
    row_faults: int = 0  # of the errors
    duplicates: int = 0  # submits under a rid that is live: ignored
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    bounded_steps: int = 0  # of them, those with prompt tokens beside decoding sequences that have a target
    late_steps: int = 0  # of these, those that took longer than their bound


class EngineCore:
    """`depth` plans may be in flight; with `ahead`, plans rely on tokens that are still being sampled (see Scheduler).
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
        policy_settings: PolicySettings = PolicySettings(),
    ) -> None:
        self.limits = limits
        self.engine = engine
        self.epoch = epoch
        self.check = check
        self.scheduler = Scheduler(limits, POLICIES.find(policy)(policy_settings), depth, ahead=ahead)
        self.requests: dict[tuple[str, int], Request] = {}
        self.outbox = Outbox(engine)
        self.counters = Counters()
        self.step_times = StepTimes()
        self.admission = QueueAdmission(self.scheduler, limits.max_wait)
        self.draining = False
        self._arrivals = 0
        self._admitted: dict[str, int] = {}
        self._deadlines: list[tuple[float, int, bool, Request]] = []  # when, arrival, of the whole request, request
        self._loads = 0

    # ------------------------------------------------------------ events

    def submit(self, front: str, submit: Submit, now: float) -> None:
        """Queues a sequence, or ends it at once with the reason. Never raises for an invalid request."""
        self._admitted[front] = max(submit.ticket, self._admitted.get(front, 0))
        if (front, submit.rid) in self.requests:
            self.counters.duplicates += 1
            return
        self.counters.submitted += 1
        try:
            check_submit(submit, self.limits)
            self._check_capacity(submit)
            request = Request(front, submit, self._arrivals + 1, now, self.limits.max_len, self.limits.itl_target)
            self.admission.check(request)
        except TriremeError as error:
            self._refuse(front, submit.rid, error)
        else:
            self._enqueue(request, submit, now)
        self._after_event()

    def abort(self, front: str, rids: Sequence[int]) -> None:
        """Ends sequences of a frontend. Unknown ids are ignored: those sequences have just ended by themselves."""
        for rid in rids:
            request = self.requests.get((front, rid))
            if request is not None:
                self._end(request, "abort")
        self._after_event()

    def reclaim(self, count: int, to: int, now: float) -> int:
        """Drops up to `count` queued sequences that never started, those with the longest wait ahead, and tells their frontends to
        resubmit them to engine `to`; returns how many. None of them gets an End here."""
        waiting = (row for row in self.scheduler.waiting if row.state is State.WAITING and row.wait.may_move)
        policy = self.scheduler.policy
        chosen = heapq.nlargest(count, waiting, key=lambda row: (policy.standing(policy.lane(row)), row.key))
        for request in chosen:
            self.scheduler.end(request)
            del self.requests[request.front, request.rid]
            self.counters.returned += 1
            self.outbox.to(request.front).returned.append((request.rid, to, now - request.stats.queued_at_s))
        self._after_event()
        return len(chosen)

    def front_gone(self, front: str) -> None:
        """A frontend died: ends its sequences without output."""
        for request in [row for row in self.requests.values() if row.front == front]:
            self._end(request, "abort")
        self.outbox.drop(front)
        self._admitted.pop(front, None)
        self._after_event()

    def tick(self, now: float) -> None:
        """Ends sequences that have waited too long for their first step, and those past their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, is_total, request = heapq.heappop(self._deadlines)
            passed_s = now - request.stats.queued_at_s
            if is_total and request.state is not State.ENDED:
                late = DeadlineError(f"not complete when its deadline came, {passed_s:.3g} s in this engine")
                self._end(request, "error", error=late)
            elif request.state is State.WAITING:
                self.counters.refused += 1
                error = OverloadedError(f"no place in the batch within {passed_s:.1f} s of waiting")
                self._end(request, "error", error=error)
        for request, error in self.admission.take_hopeless(now):
            self.counters.refused += 1
            self._end(request, "error", error=error)
        self._after_event()

    def on_result(self, result: StepResult, now: float) -> None:
        """Applies the answer to the oldest plan in flight. Raises EngineError when it does not fit that plan."""
        scheduler = self.scheduler
        if not scheduler.in_flight or scheduler.in_flight[0].step != result.step:
            expected = scheduler.in_flight[0].step if scheduler.in_flight else "none"
            raise EngineError(f"the workers answered step {result.step}; the oldest one in flight is {expected}")
        pending = scheduler.complete(now)
        self.counters.steps += 1
        is_pipeline = scheduler.depth > 1 and not scheduler.ahead
        num_tokens = pending.total_tokens if result.agreed is None else result.agreed.num_tokens
        began = pending.planned_s if is_pipeline else pending.started_s
        seconds = self.step_times.own_s(began, now)
        self.step_times.note(num_tokens, seconds)
        if pending.chunks or seconds > LONG_S or not pending.step % SAMPLED:
            scheduler.budget.times.observe(pending.shape(), seconds)
        if pending.chunks:
            self.admission.computed(pending.total_tokens - len(pending.at), seconds)
        if pending.chunks and pending.bound_s < inf:
            self.counters.bounded_steps += 1
            self.counters.late_steps += seconds > pending.bound_s
        tokens = self._tokens_of(result)
        in_order = result.rows == pending.asking_rows()
        if not in_order or result.faults or result.prompt_logprobs or result.logprobs:
            self._on_rare(pending, result)
        if in_order:
            count = len(pending.at)
            if pending.decode_batch is not None:
                self._on_decode_batch(pending, pending.decode_batch, tokens[:count])
            if pending.chunks:
                asking = [(chunk.row, chunk.request) for chunk in pending.chunks if chunk.sample]
                self._on_tokens(pending, asking, tokens[count:].tolist(), now)
        else:
            places = pending.places()
            asking = [(row, places[row].request) for row in unpack(result.rows).tolist()]
            self._on_tokens(pending, asking, tokens.tolist(), now)
        if pending.chunks:
            self._end_scored(pending, now)
        self._after_event()

    def next_plan(self, now: float) -> StepPlan | None:
        """The next step to run, or None when there is no work or `depth` plans are in flight."""
        pending = self.scheduler.schedule(now)
        if pending is None:
            return None
        self.admission.planned(len(pending.placed), now)
        for request in pending.placed:
            self.outbox.to(request.front).placed.append(request.rid)
        self._after_event()
        return pending.to_message()

    def empty_plan(self, now: float) -> StepPlan | None:
        """A dummy step for lockstep ranks that have no work. None while `depth` plans are in flight."""
        pending = self.scheduler.schedule_none(now)
        return None if pending is None else pending.to_message()

    def abort_all(self, why: str) -> None:
        """Ends every sequence with a retryable error."""
        for request in list(self.requests.values()):
            self._end(request, "error", error=OverloadedError(why))
        self._after_event()

    # ------------------------------------------------------------ outputs

    def take_outputs(self) -> dict[str, StepOutputs]:
        """Everything since the last call, one message per frontend."""
        return self.outbox.take(self.scheduler.completed) if self.outbox.fronts else {}

    @property
    def is_idle(self) -> bool:
        """No live request and no step in flight."""
        return not self.requests and not self.scheduler.in_flight

    def next_deadline(self) -> float | None:
        """When `tick` next has work (or slightly earlier)."""
        return self._deadlines[0][0] if self._deadlines else None

    def oldest_step(self) -> tuple[int, float, int] | None:
        """The oldest plan in flight: its number, its start (when it was made or its predecessor ended), and its tokens."""
        if not self.scheduler.in_flight:
            return None
        pending = self.scheduler.in_flight[0]
        return pending.step, pending.started_s, pending.total_tokens

    def stats(self, now: float) -> Load:
        """The load report for the coordinator; each call takes the next report number. `now` in seconds."""
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
            running_tokens=int(scheduler.columns.known.sum()),
            blocks_used=self.limits.num_blocks - scheduler.cache.num_available,
            num_blocks=self.limits.num_blocks,
            oldest_wait_s=max((now - row.stats.queued_at_s for row in waiting), default=0.0),
            admitted=dict(self._admitted),
            finished=self.counters.submitted - len(self.requests),
        )

    def log_blocks(self) -> BlockLog:
        """Makes `take_kv_events` report from now on which contents enter and leave the prefix cache."""
        pool = self.scheduler.cache.pool
        pool.log = pool.log or BlockLog(pool.index)
        return pool.log

    def take_kv_events(self) -> KVEvents | None:
        """The next report for the coordinator's prefix index, or None if nothing has changed."""
        log = self.scheduler.cache.pool.log
        return log.take(self.engine, self.epoch, self.limits.num_blocks) if log is not None and log.is_due else None

    def facts(self) -> EngineFacts:
        """The limits that frontends need, as sent in the handshake."""
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
        """The same for an idle engine, in constant time. Raises IntegrityError."""
        check_idle(self.scheduler)
        self._check_totals()

    def _check_totals(self) -> None:
        totals = self.counters
        ended = totals.stop + totals.length + totals.abort + totals.error + totals.returned
        if totals.submitted != ended + len(self.requests):
            raise IntegrityError(f"{totals.submitted} submitted, but {ended} ended and {len(self.requests)} live")

    def reset_prefix_cache(self) -> int:
        """Drops all cached prefixes; returns how many blocks were known. Running sequences keep theirs."""
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
        if submit.num_moves:
            return  # accepted once already; the number of such requests is bounded by the queues of the engines that died
        if len(waiting) >= limits.max_waiting:
            raise OverloadedError(f"{len(waiting)} requests are queued already; the limit is {limits.max_waiting}")
        num_tokens = waiting.num_tokens + len(submit.prompt)
        if waiting and num_tokens > limits.max_waiting_tokens:
            raise OverloadedError(
                f"{num_tokens} prompt tokens would be queued; the limit is {limits.max_waiting_tokens}"
            )

    def _enqueue(self, request: Request, submit: Submit, now: float) -> None:
        self._arrivals += 1
        self.requests[request.front, request.rid] = request
        self.counters.prompt_tokens += request.num_prompt
        self.scheduler.add(request)
        if request.num_output >= submit.params.max_tokens > 0:
            self._end(request, "length")  # a resubmitted sequence that already had all its tokens
            return
        limits = [limit for limit in (self.limits.queue_timeout, submit.deadline_s) if limit > 0]
        if limits and not submit.num_replayed:
            heapq.heappush(self._deadlines, (now + min(limits), request.arrival, False, request))
        if submit.total_s > 0:
            heapq.heappush(self._deadlines, (now + submit.total_s, request.arrival, True, request))
        self._drop_met_deadlines()

    def _drop_met_deadlines(self) -> None:
        """Bounds the heap by about the number of requests: a deadline that was met needs no timer."""
        if len(self._deadlines) > 4 * len(self.requests) + 64:
            self._deadlines = [
                entry
                for entry in self._deadlines
                if entry[3].state is State.WAITING or (entry[2] and entry[3].state is not State.ENDED)
            ]
            heapq.heapify(self._deadlines)

    def _refuse(self, front: str, rid: int, error: TriremeError) -> None:
        self.counters.error += 1
        self.counters.refused += 1
        self.outbox.to(front).ends.append(
            End(rid, "error", error=error.message, error_code=error.code, retry_after_s=_retry_after_s(error))
        )

    # ------------------------------------------------------------ results

    def _tokens_of(self, result: StepResult) -> Ints:
        """The sampled tokens. Raises EngineError when one is outside the vocabulary."""
        tokens = unpack(result.tokens)
        as_found = tokens.view(np.uint32)  # negative ids become large
        if tokens.size and as_found[as_found.argmax()] >= self.limits.vocab_size:
            wrong = tokens[(tokens < 0) | (tokens >= self.limits.vocab_size)][:8].tolist()
            raise EngineError(f"step {result.step} sampled {wrong}, not in 0..{self.limits.vocab_size - 1}")
        return tokens

    def _check_complete(self, places: dict[int, PlannedTokens], result: StepResult) -> None:
        """Checks that every sampling sequence gets exactly one token or fault."""
        rows = unpack(result.rows).tolist()
        answered = {*rows, *(fault.row for fault in result.faults)}
        expected = {row for row, place in places.items() if place.sample}
        named = len(rows) + len(result.faults)
        scored = {scores.rid for scores in chain(result.prompt_logprobs, result.logprobs)}
        if not (expected <= answered <= places.keys() and scored <= places.keys()) or len(answered) != named:
            raise EngineError(
                f"step {result.step} asked for tokens of {len(expected)} sequences; the worker named {named}: "
                f"missing {sorted(expected - answered)[:8]}, unknown {sorted((answered | scored) - places.keys())[:8]}"
            )

    def _on_fault(self, pending: PendingStep, place: PlannedTokens, fault: RowFault) -> None:
        """Ends one sequence. What it wrote in this step may be garbage, so no other sequence may find it or keep reading it."""
        if fault.row not in pending.dropped:
            error: TriremeError = RequestError(fault.error)
            if not fault.by_request:
                self.counters.row_faults += 1
                error = EngineError(f"this request failed in the model: {fault.error}")
            self._end(place.request, "error", error=error)
        self.scheduler.invalidate(place.request, place.num_computed)

    def _on_rare(self, pending: PendingStep, result: StepResult) -> None:
        """Handles faults and log-probabilities, and checks an unusual answer against the plan."""
        places = pending.places()
        self._check_complete(places, result)
        for fault in result.faults:
            self._on_fault(pending, places[fault.row], fault)
        for scores in result.prompt_logprobs:
            self._on_scores(pending, places[scores.rid], scores)
        for scores in result.logprobs:
            self._on_logprobs(pending, places[scores.rid].request, scores)

    def _on_decode_batch(self, pending: PendingStep, decode_batch: DecodeBatch, tokens: Ints) -> None:
        """One token for each decoding sequence, in order. Works on whole columns, since every sequence is in every step."""
        at = pending.at
        if pending.dropped:
            kept = ~np.isin(decode_batch.slots, list(pending.dropped))
            decode_batch, at, tokens = decode_batch.where(kept), at[kept], tokens[kept]
        if not len(decode_batch):
            return
        columns = self.scheduler.columns
        known = at + 1
        place = known % columns.tail.shape[1]
        full = (place == 0).nonzero()[0]
        if full.size:
            self.scheduler.cache.take_tails(decode_batch.requests[full], columns.tail[decode_batch.slots[full]])
        columns.append(decode_batch.slots, place, tokens)
        columns.known[decode_batch.slots] = at + 2
        if not self.scheduler.ahead:
            columns.token[decode_batch.slots] = tokens
        self.outbox.add(decode_batch, tokens)
        self.counters.output_tokens += len(tokens)
        ends = (at + 2 >= columns.limit[decode_batch.slots]).nonzero()[0].tolist()
        stopping = decode_batch.stopping(tokens)
        for i in sorted({*ends, *stopping}) if stopping else ends:
            self._end_if_over(decode_batch.requests[i], int(tokens[i]))

    def _on_tokens(
        self, pending: PendingStep, asking: list[tuple[int, Request]], tokens: list[int], now: float
    ) -> None:
        """The same one by one, for (slot, request) in order: most of them have just finished their prompt."""
        for (row, request), token in zip(asking, tokens, strict=True):
            if row in pending.dropped:
                continue
            request.append(token)
            if not self.scheduler.ahead:
                self.scheduler.columns.token[row] = token
            self.outbox.to(request.front).add(request.rid, token)
            self.counters.output_tokens += 1
            if request.stats.first_token_s < 0:
                self._on_first(request, now)
            self._end_if_over(request, token)

    def _end_if_over(self, request: Request, token: int) -> None:
        """Applies the stop rules to a sequence that has just got `token`."""
        reason = end_reason(request, token)
        if reason is not None:
            self._end(request, reason, stop_token=token if reason == "stop" else -1)

    def _on_first(self, request: Request, now: float) -> None:
        request.stats.first_token_s = now
        self.counters.cached_tokens += request.stats.num_cached
        self.outbox.first(request)

    def _on_logprobs(self, pending: PendingStep, request: Request, scores: LogprobRow) -> None:
        if scores.rid not in pending.dropped:
            outputs = self.outbox.to(request.front)
            outputs.logprobs.append(LogprobRow(request.rid, scores.token_ids, scores.logprobs, scores.ranks))

    def _on_scores(self, pending: PendingStep, place: PlannedTokens, scores: LogprobRow) -> None:
        """Prompt log-probabilities of a chunk; those recomputed after a preemption are cut off."""
        if scores.rid in pending.dropped:
            return
        request, start = place.request, place.num_computed
        skip = max(0, request.stats.num_scored - start)
        count = len(scores.ranks)
        if skip < count:
            columns = (scores.token_ids[skip:], scores.logprobs[skip:], scores.ranks[skip:])
            fresh = LogprobRow(request.rid, *(np.ascontiguousarray(column) for column in columns))
            self.outbox.to(request.front).prompt_logprobs.append(fresh)
            request.stats.num_scored = start + count

    def _end_scored(self, pending: PendingStep, now: float) -> None:
        """Sequences that generate nothing end with their last prompt chunk."""
        for chunk in pending.chunks:
            request = chunk.request
            if chunk.sample or chunk.row in pending.dropped:
                continue
            if request.num_left == 0 and request.last_step == pending.step:
                self._on_first(request, now)
                self._end(request, "length")

    # ------------------------------------------------------------ ends

    def _end(
        self, request: Request, reason: EndReason, *, stop_token: int = -1, error: TriremeError | None = None
    ) -> None:
        """The only exit of a live request."""
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
                num_preemptions=request.stats.num_preemptions,
                retry_after_s=_retry_after_s(error),
            )
        )

    def _after_event(self) -> None:
        if self.check:
            self.audit()


def _retry_after_s(error: TriremeError | None) -> float:
    return error.retry_after_s if isinstance(error, OverloadedError) else 0.0

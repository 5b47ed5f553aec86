"""Executes StepPlans on a GPU: launches a step, and returns a LaunchedStep that waits for its tokens. Owned by
workers.cuda.worker.

While a step runs the next one may be launched: the tokens in between stay on the device. A step with sequences that the host
must sample (logits processors that the device lacks) is waited for, and only their logits are copied; one that scores a
prompt goes through workers.cpu.runner. One thread launches; any thread may wait.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from trireme.models.cuda.attention.prefill_plan import PIECES
from trireme.models.cuda.ops import JOB, MOST_LOGPROBS, NOTHING_LEFT
from trireme.transport.wire.columns import pack, unpack, unpack_flags
from trireme.transport.wire.messages import LogprobRow, NewRow, RowFault, StepPlan, StepResult
from trireme.workers.batch import Batch
from trireme.workers.cpu.runner import Runner
from trireme.workers.cuda.device_state import Ints, block_changes, job_of
from trireme.workers.cuda.graph_policy import Size
from trireme.workers.cuda.graphs import MOST_PIECES, DecodeGraphs, GraphSet, MixedGraphs
from trireme.workers.cuda.logits_processors import DeviceRules, is_for_device
from trireme.workers.cuda.staging import Answer
from trireme.workers.cuda.steps import PrefillDecodeStep, Steps
from trireme.workers.inputs import StepRows
from trireme.workers.logits_processors import LogitRules
from trireme.workers.sampling.sampler import ALL_MASKED, Sampler

NOT_FINITE = "sampling failed: the model gave logits that are not finite"


def logprob_rows(rows: NDArray[np.int64], tokens: Ints, counts: Ints, words: Ints) -> list[LogprobRow]:
    """Decodes the device's words [n, LOGPROB_WORDS] for the slots `rows` that got a token and want counts[i] log-probabilities."""
    found = []
    for i in np.flatnonzero((counts > 0) & (tokens >= 0)).tolist():
        ranks, ids, values = np.split(words[i : i + 1].copy(), (1, 1 + MOST_LOGPROBS), axis=1)
        count = int(counts[i])
        found.append(LogprobRow(int(rows[i]), ids[:, :count], values[:, :count].view(np.float32), ranks[0]))
    return found


@dataclass(slots=True)
class LaunchedStep:
    """A launched step. `rows` are the sampling slots, in plan order; `at` are the positions of their new tokens."""

    step: int
    started: float
    rows: NDArray[np.int64]
    at: NDArray[np.int32]
    answer: Answer | None  # None: the result is available
    faults: list[RowFault]
    found: StepResult | None = None
    num_logprobs: Ints | None = None  # per slot, where the answer holds any

    def result(self) -> StepResult:
        """Waits for the step."""
        if self.found is not None:
            return self.found
        if self.answer is None:
            return self.filled(np.zeros(0, np.int32), [])
        tokens, words = self.answer.read(), self.answer.read_more()
        if words is None or self.num_logprobs is None:
            return self.filled(tokens, [])
        return self.filled(tokens, logprob_rows(self.rows, tokens, self.num_logprobs, words))

    def filled(self, tokens: NDArray[np.int32], logprobs: list[LogprobRow]) -> StepResult:
        """The result, from the tokens of `rows`; negative ones are faults, of the model unless already reported."""
        rows, faults = self.rows, self.faults
        bad = tokens < 0
        if bad.any():
            told = {fault.row for fault in faults}
            faults = [
                *faults,
                *(
                    RowFault(row, ALL_MASKED, by_request=True) if why == NOTHING_LEFT else RowFault(row, NOT_FINITE)
                    for row, why in zip(rows[bad].tolist(), tokens[bad].tolist(), strict=True)
                    if row not in told
                ),
            ]
            rows, tokens = rows[~bad], tokens[~bad]
        elapsed = time.perf_counter() - self.started
        return StepResult(self.step, pack(rows), pack(tokens), logprobs, [], faults, elapsed)


class GpuRunner:
    """The step loop body of one device. `slow` is the runner over the same batch and cache that copies logits to the host."""

    def __init__(
        self, steps: Steps, graphs: DecodeGraphs, batch: Batch, slow: Runner, mixed: MixedGraphs | None = None
    ) -> None:
        self._steps, self._graphs, self._batch, self._slow = steps, graphs, batch, slow
        self._mixed_graphs = mixed
        num_rows = len(batch.params)
        self._sampler = Sampler(batch.vocab_size)
        self._rules = DeviceRules(num_rows, batch.vocab_size, steps.device)
        self._needs_host = np.zeros(num_rows, np.bool_)
        self._num_logprobs = np.zeros(num_rows, np.int32)
        self._scores = np.zeros(num_rows, np.bool_)  # sequences that want log-probabilities of their prompt
        self._placed = np.zeros(num_rows, np.int64)  # launches before the slot got its request
        self._unseen: deque[tuple[int, LaunchedStep]] = deque()  # launches whose tokens the host's batch lacks
        self.num_launched = 0
        self.max_logits = slow.max_logits
        self.num_slow = 0

    @property
    def keeps_tokens(self) -> bool:
        """Whether sampled tokens stay here, so that plans must not bring them."""
        return self._slow.keeps_tokens

    @property
    def num_rows(self) -> int:
        """Sequences in the persistent batch."""
        return self._batch.num_rows()

    @property
    def num_steps(self) -> int:
        return self.num_launched

    def execute(self, plan: StepPlan) -> StepResult:
        """Launches a step and waits for it."""
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launches a step behind those in flight. Raises EngineError for a plan that does not fit the batch."""
        started = time.perf_counter()
        for row in plan.freed:
            self._rules.drop(row)
        for new in plan.new:
            self._rules.drop(new.row)
        for new in plan.new:
            is_free = is_for_device(new.params)
            self._needs_host[new.row] = not (
                is_free and (not LogitRules.needed(new.params) or self._rules.admit(new.row))
            )
            self._num_logprobs[new.row] = 1 + min(new.params.logprobs, self._batch.vocab_size)
            self._scores[new.row] = new.params.prompt_logprobs >= 0
        rows = self._batch.rows_of(plan)
        is_slow = bool(self._scores[rows].any())
        self._catch_up(wait=is_slow or bool(self._needs_host[rows].any()))
        self.num_launched += 1
        self._steps.copy_blocks(plan.copies)
        return self._wait_out(plan) if is_slow else self._launch(plan, started)

    def _launch(self, plan: StepPlan, started: float) -> LaunchedStep:
        batch = self._batch
        batch.apply(plan)
        self._place(plan.new)
        step = StepRows(
            batch.rows_of(plan), unpack(plan.num_tokens), unpack(plan.num_computed), unpack_flags(plan.sample)
        )
        shape = self._shape_of(step)
        if (graphs := self._set_of(shape)) is not None:
            graphs.policy.note(shape)  # by the plan: other ranks may not know yet which sequences have failed
        faults = batch.row_faults(step.rows)
        if faults:
            step = step.where(~np.isin(step.rows, list(batch.faults)))
            shape = self._shape_of(step)
            graphs = self._set_of(shape)
        changes = block_changes(plan, batch)
        sampling, samples_here = step.rows[step.sample], self._steps.samples
        at_host = self._needs_host[sampling]
        asking = sampling if samples_here else sampling[:0]
        at = (step.num_computed + step.num_tokens)[step.sample][: asking.size]
        ticket = LaunchedStep(plan.step, started, asking, at, None, faults)
        if not step.rows.size:
            self._steps.change_blocks(changes)
            return ticket
        if at_host.any() and samples_here:
            return self._launch_and_sample(ticket, self._steps.mix(batch, step, changes, at_host=at_host), at_host)
        if graphs is None or (size := graphs.policy.fit(shape)) is None:
            tokens, logprobs, _ = self._steps.mixed(self._steps.mix(batch, step, changes))
        elif len(size) == 1:
            tokens, logprobs = self._graphs.run(size, batch, step, changes, self._steps.rows)
        else:
            assert self._mixed_graphs is not None
            tokens, logprobs = self._mixed_graphs.run(size, self._steps.mix(batch, step, changes, rules=PIECES))
        if asking.size:
            counts = self._num_logprobs[asking]
            if counts.any():
                ticket.num_logprobs, ticket.answer = counts, Answer(tokens, logprobs)
            else:
                ticket.answer = Answer(tokens)
            if self.keeps_tokens:
                batch.expect_sampled(asking)
                self._unseen.append((self.num_launched, ticket))
        return ticket

    def _shape_of(self, step: StepRows) -> Size:
        """(sequences,) of a decode step, (decoding sequences, prompt tokens) of a small one with prompts, () of one without a
        graph: the same on all stages, since the hidden states passed between them are padded."""
        sampling, is_one = step.rows[step.sample], step.num_tokens == 1
        if not step.rows.size or bool(self._needs_host[sampling].any()):
            return ()
        if sampling.size == step.rows.size and bool(is_one.all()):
            return (step.rows.size,)
        decodes = int(is_one.sum())
        tokens = int(step.num_tokens.sum()) - decodes
        return (decodes, tokens) if tokens and step.rows.size - decodes <= MOST_PIECES else ()

    def _set_of(self, shape: Size) -> GraphSet | None:
        """The graphs for steps of this kind."""
        if len(shape) == 1:
            return self._graphs.set
        return self._mixed_graphs.set if shape and self._mixed_graphs is not None else None

    def _launch_and_sample(
        self, ticket: LaunchedStep, step: PrefillDecodeStep, at_host: NDArray[np.bool_]
    ) -> LaunchedStep:
        """A step in which the host samples the slots `at_host`, as soon as their logits have arrived."""
        on_device, logprobs, logits = self._steps.mixed(step)
        wanted = torch.from_numpy(np.flatnonzero(at_host)).to(logits.device)
        values = logits.index_select(0, wanted).float().cpu().numpy()
        tokens = on_device.cpu().numpy().copy()
        rows = ticket.rows[at_host]
        sampled = self._sampler.sample(values, rows, self._batch)
        token_of = dict(zip(sampled.rows, sampled.tokens, strict=True))
        tokens[at_host] = [token_of.get(row, -1) for row in rows.tolist()]
        ticket.faults += sampled.faults
        if self.keeps_tokens:
            self._batch.keep_sampled(ticket.rows, tokens)
        self._steps.tell_tokens(np.array(sampled.rows, np.int64), np.array(sampled.tokens, np.int32))
        counts = np.where(at_host, 0, self._num_logprobs[ticket.rows])
        if counts.any():
            sampled.logprobs += logprob_rows(ticket.rows, tokens, counts, logprobs.cpu().numpy())
        ticket.found = ticket.filled(tokens, sampled.logprobs)
        return ticket

    def _wait_out(self, plan: StepPlan) -> LaunchedStep:
        """Runs the whole step through the host; then the device gets the tokens that it would otherwise have kept."""
        self.num_slow += 1
        started = time.perf_counter()
        result = self._slow.execute(msgspec.structs.replace(plan, copies=[]) if plan.copies else plan)
        self._place(plan.new)
        self._steps.change_blocks(block_changes(plan, self._batch))
        if result is None:  # another stage samples
            return LaunchedStep(plan.step, started, np.zeros(0, np.int64), np.zeros(0, np.int32), None, [])
        rows, tokens = unpack(result.rows), unpack(result.tokens)
        self._steps.tell_tokens(rows, tokens)
        counted = {new.row for new in plan.new} if self.keeps_tokens else ()  # already counted in their records
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            if row not in counted:
                self._rules.count(row, token)
        return LaunchedStep(plan.step, started, rows.astype(np.int64), np.zeros(0, np.int32), None, [], result)

    def _place(self, new: list[NewRow]) -> None:
        """The jobs of new sequences, and the launch from which on they are here."""
        if not new:
            return
        rows = np.array([row.row for row in new], np.int32)
        self._placed[rows] = self.num_launched
        jobs = np.zeros(rows.size, JOB)
        ruled = {}
        for i, row in enumerate(new):
            jobs[i] = job_of(row.params, self._batch.vocab_size)
            rules = self._batch.rules[row.row]
            if rules is not None and row.row in self._rules and self._steps.samples:
                ruled[i] = row.row, rules, self._batch.row_tokens(row.row)
        if ruled:
            self._rules.write(jobs, ruled, self._steps.send)
        self._steps.write_jobs(rows, jobs)

    def _catch_up(self, *, wait: bool) -> None:
        """Copies arrived tokens into the host's batch; with `wait` all of them."""
        while self._unseen:
            launch, ticket = self._unseen[0]
            assert ticket.answer is not None
            if not wait and not ticket.answer.has_come():
                return
            self._unseen.popleft()
            tokens = ticket.answer.read()
            same = self._placed[ticket.rows] <= launch
            for row in ticket.rows[same & (tokens < 0)].tolist():
                self._batch.faults[row] = "this sequence got no token in an earlier step"
            sound = same & (tokens >= 0)
            self._batch.fill_in(ticket.rows[sound], ticket.at[sound], tokens[sound])

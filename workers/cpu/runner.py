"""Carries out StepPlans: applies the deltas, builds inputs, runs the model, samples. Owned by workers.cpu.worker.

One thread. An error that belongs to one sequence becomes a RowFault; the batch continues. Every worker of an engine takes the
same decisions from the same plan, so that collectives stay in step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from trireme.errors import EngineError
from trireme.models.forward import Group, HostKV, Logits, Model
from trireme.topology.lockstep import Agreed, Ballot
from trireme.topology.mesh import Mesh
from trireme.transport.wire.columns import pack, unpack, unpack_flags
from trireme.transport.wire.messages import LogprobRow, RowFault, StepPlan, StepResult
from trireme.workers.batch import ROW_ERRORS, Batch
from trireme.workers.cpu.memory import LOGITS_BYTES
from trireme.workers.inputs import InputBuilder, StepRows, Wanted
from trireme.workers.kv.tensors import copy_blocks
from trireme.workers.sampling.logprobs import logprob_row
from trireme.workers.sampling.sampler import Sampled, Sampler

_MODEL_FAILED = "the model failed on this sequence"


@dataclass(slots=True)
class _Outcome:
    """Results of one step gathered so far."""

    sampled: Sampled = field(default_factory=Sampled)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)


class LockstepPeers(Protocol):
    """Lockstep engines, as workers.cpu.worker joins them."""

    def meet(self, ballot: Ballot | None, num_tokens: int, num_pieces: int) -> Agreed:
        """Agrees on the step."""
        ...

    def dummy_forward(self) -> None:
        """Takes part in a forward of the lockstep peers without sequences of its own."""
        ...


class Runner:
    """One worker's step loop body over a loaded model and its KV.

    `keeper` is the group of ranks that keep the tokens they sample, for steps planned before anybody else knows them; with
    None each plan brings the tokens of the steps before. `lockstep_peers` are the engines that take every step with this
    one, in as many forwards: then no forward is retried.
    """

    def __init__(
        self,
        model: Model,
        kv: list[HostKV],
        batch: Batch,
        inputs: InputBuilder,
        mesh: Mesh,
        *,
        keeper: Group | None = None,
        lockstep_peers: LockstepPeers | None = None,
    ) -> None:
        self._keeper = keeper
        self._lockstep_peers = lockstep_peers
        self.before_forward: Callable[[], object] = lambda: None
        self._model = model
        self._kv = kv
        self._batch = batch
        self._inputs = inputs
        self._mesh = mesh
        self._sampler = Sampler(batch.vocab_size)
        self.max_logits = max(1, LOGITS_BYTES // (4 * model.vocab_size))  # positions of one forward
        self.num_steps = 0

    @property
    def keeps_tokens(self) -> bool:
        """Whether sampled tokens stay here, so that plans must not bring them."""
        return self._keeper is not None

    @property
    def num_rows(self) -> int:
        """Sequences in the persistent batch."""
        return self._batch.num_rows()

    @property
    def num_used_blocks(self) -> int:
        """One more than the highest KV block that any sequence was ever given."""
        return self._batch.num_used_blocks

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step. None on workers that do not report.

        Raises EngineError for a plan that does not fit the batch, and any error of the model that no single sequence causes (or
        when other workers take part and the step cannot be retried).
        """
        started = time.perf_counter()
        batch = self._batch
        batch.apply(plan)
        copy_blocks(self._kv, plan.copies)
        step = self._rows_of(plan)
        outcome = _Outcome(faults=batch.row_faults(step.rows))
        if outcome.faults:
            step = step.where(~np.isin(step.rows, list(batch.faults)))
        agreed = self._run_pieces(plan, step, outcome)
        if step.rows.size and self._keeper is not None:
            self._keep(self._keeper, step.rows[step.sample], outcome.sampled)
        self.num_steps += 1
        if not self._mesh.reports_result:
            return None
        result = _result(plan, outcome, time.perf_counter() - started)
        return result if agreed is None else msgspec.structs.replace(result, agreed=agreed)

    def _run_pieces(self, plan: StepPlan, step: StepRows, outcome: _Outcome) -> Agreed | None:
        """Runs all pieces of a step; then, in lockstep, dummy forwards for the peers' further pieces. Returns what was agreed."""
        pieces, agreed = list(self._pieces(step)) if step.rows.size else [], None
        if self._lockstep_peers is not None:
            agreed = self._lockstep_peers.meet(plan.ballot, int(step.num_tokens.sum()), len(pieces))
        for piece in pieces:
            self._try(piece, outcome)
        if self._lockstep_peers is not None and agreed is not None:
            for _ in range(agreed.num_pieces - len(pieces)):
                self._lockstep_peers.dummy_forward()
        return agreed

    def _keep(self, group: Group, rows: NDArray[np.int64], sampled: Sampled) -> None:
        """Stores the sampled tokens in this worker's batch, on every rank those of rank 0."""
        if not rows.size:
            return
        tokens = np.full(rows.size, -1, np.int32)
        if sampled.rows == rows.tolist():
            tokens[:] = sampled.tokens
        elif sampled.rows:
            token_of = dict(zip(sampled.rows, sampled.tokens, strict=True))
            tokens[:] = [token_of.get(row, -1) for row in rows.tolist()]
        if group.size > 1:
            from trireme.models.cpu.tensors import gather_tokens

            tokens = gather_tokens(group, tokens)
        self._batch.keep_sampled(rows, tokens)

    def _rows_of(self, plan: StepPlan) -> StepRows:
        return StepRows(
            self._batch.rows_of(plan), unpack(plan.num_tokens), unpack(plan.num_computed), unpack_flags(plan.sample)
        )

    def _pieces(self, step: StepRows) -> Iterator[StepRows]:
        """Splits the step so that the logits of prompt positions stay within LOGITS_BYTES: first the leading chunks of the
        sequences that want them, then everything else in one piece."""
        wants = self._batch.wants_prompt[step.rows]
        if not wants.any():
            yield step
            return
        part = max(1, self.max_logits // int(wants.sum()))
        while (ahead := wants & (step.num_tokens > part)).any():
            front = step.where(ahead)
            front.num_tokens = np.full_like(front.num_tokens, part)
            front.sample = np.zeros_like(front.sample)
            yield front
            moved = np.where(ahead, np.int32(part), np.int32(0))
            step = StepRows(step.rows, step.num_tokens - moved, step.num_computed + moved, step.sample)
        yield step

    def _try(self, step: StepRows, outcome: _Outcome) -> None:
        """Runs one forward. Raises EngineError when several sequences were tried one by one and every one failed."""
        before = len(outcome.faults)
        self._run(step, outcome)
        failed = outcome.faults[before:]
        if len(failed) == step.rows.size > 1 and all(fault.error.startswith(_MODEL_FAILED) for fault in failed):
            raise EngineError(f"the model failed on each of {len(failed)} sequences; first: {failed[0].error}")

    def _run(self, step: StepRows, outcome: _Outcome) -> None:
        """One forward and the results from its logits. If it raises, the step is bisected down to the failing sequence; KV is
        then written again, which changes nothing."""
        try:
            forward, wanted = self._inputs.build(self._batch, step)
            self.before_forward()
            logits = self._model.forward(forward, self._kv)
        except ROW_ERRORS as error:
            if self._mesh.num_workers > 1 or self._lockstep_peers is not None:
                raise
            if step.rows.size == 1:
                outcome.faults.append(RowFault(int(step.rows[0]), f"{_MODEL_FAILED}: {error}"))
                return
            for half in _halves(step):
                self._run(half, outcome)
            return
        if logits is not None and self._mesh.reports_result:
            self._read_logits(logits, wanted, outcome)

    def _read_logits(self, values: Logits, wanted: Wanted, outcome: _Outcome) -> None:
        if values.shape[1] > self._batch.vocab_size:  # padding of the vocabulary
            values = values[:, : self._batch.vocab_size]
        for row, first, count, at in wanted.prompt:
            try:
                k = self._batch.row_params(row).prompt_logprobs
                targets = self._batch.row_tokens(row)[first + 1 : first + 1 + count]
                outcome.prompt_logprobs.append(logprob_row(row, values[at : at + count], targets, k))
            except ROW_ERRORS as error:
                outcome.faults.append(RowFault(row, f"prompt log-probabilities failed: {error}"))
        own = values if wanted.sampling_at is None else values[wanted.sampling_at]
        sampled = self._sampler.sample(own, wanted.sampling, self._batch)
        outcome.sampled.extend(sampled)


def _halves(step: StepRows) -> list[StepRows]:
    first = np.arange(step.rows.size) < step.rows.size // 2
    return [step.where(first), step.where(~first)]


def _merged(entries: list[LogprobRow]) -> list[LogprobRow]:
    """One entry per sequence: a step in several pieces gives several, in order of position."""
    by_row: dict[int, list[LogprobRow]] = {}
    for entry in entries:
        by_row.setdefault(entry.rid, []).append(entry)
    return [
        parts[0]
        if len(parts) == 1
        else LogprobRow(
            row,
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
        )
        for row, parts in by_row.items()
    ]


def _result(plan: StepPlan, outcome: _Outcome, elapsed_s: float) -> StepResult:
    """The result of the plan; a faulted sequence contributes only its first fault."""
    sampled, faults = outcome.sampled, [*outcome.faults, *outcome.sampled.faults]
    prompt_logprobs = _merged(outcome.prompt_logprobs)
    if not faults:
        rows, tokens = pack(sampled.rows), pack(sampled.tokens)
        return StepResult(plan.step, rows, tokens, sampled.logprobs, prompt_logprobs, [], elapsed_s)
    first: dict[int, RowFault] = {}
    for fault in faults:
        first.setdefault(fault.row, fault)
    sound = [(row, token) for row, token in zip(sampled.rows, sampled.tokens, strict=True) if row not in first]
    return StepResult(
        plan.step,
        pack([row for row, _ in sound]),
        pack([token for _, token in sound]),
        [entry for entry in sampled.logprobs if entry.rid not in first],
        [entry for entry in prompt_logprobs if entry.rid not in first],
        list(first.values()),
        elapsed_s,
    )

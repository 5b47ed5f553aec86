"""A simulated worker: step time is a function of the step's shape (StepCosts), and a token a function of seed, choice, position and
previous token. So wrong, lost and repeated tokens are detected, and so is KV memory with wrong content.

`SimulatedExecutor` has the methods of engine_core's Executor; its results arrive after the step's simulated time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from trireme.coordinator.simulation.timeline import Process, Timeline
from trireme.params import RowParams
from trireme.step_time import StepCosts, StepShape
from trireme.transport.wire.columns import pack
from trireme.transport.wire.messages import LoadProgress, LogprobRow, RowFault, StepPlan, StepResult, WorkerLoaded

FAULT_TOKEN = 7  # a prompt that contains it fails in the model
POISON_TOKEN = 8  # a prompt that contains it kills its worker
FIRST_TOKEN = 16  # tokens below are never drawn


def token_at(params: RowParams, position: int, before: int, vocab_size: int) -> int:
    """The token at `position` of a sequence, after the token `before`."""
    x = params.seed * 0x9E3779B1 + params.choice * 0x85EBCA77 + position * 0xC2B2AE3D + before * 0x27D4EB2F
    x = ((x & 0xFFFFFFFF) ^ (x >> 15 & 0x1FFFF)) * 0x2C1B3C6D & 0xFFFFFFFF
    return FIRST_TOKEN + (x ^ x >> 12) % (vocab_size - FIRST_TOKEN)


def expected_tokens(prompt: list[int], params: RowParams, vocab_size: int, max_len: int) -> list[int]:
    """The tokens that a sequence emits, whatever faults happen on the way."""
    stops = {*params.eos_token_ids, *params.stop_token_ids}
    found: list[int] = []
    before = prompt[-1]
    for i in range(min(params.max_tokens, max_len - len(prompt))):
        before = token_at(params, len(prompt) + i, before, vocab_size)
        found.append(before)
        if before in stops and i >= params.min_tokens:
            break
    return found


class _Row:
    __slots__ = ("blocks", "has_failed", "is_garbage", "is_special", "params", "tokens")

    def __init__(self, tokens: list[int], params: RowParams, blocks: list[int]) -> None:
        self.is_special = min(tokens) < FIRST_TOKEN
        self.has_failed = self.is_garbage = False
        self.tokens = tokens
        self.params = params
        self.blocks = blocks


class WrongPlanError(AssertionError):
    """A plan does not fit the worker's batch."""


class PoisonError(Exception):
    """The step kills the worker."""


class SimulatedWorker:
    """Executes plans. Every position of KV memory holds (position, token) and is read back; a sequence that finds anything else
    gets wrong tokens from then on."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, costs: StepCosts, *, ahead: bool) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.costs = costs
        self.ahead = ahead
        self.rows: dict[int, _Row] = {}
        self.memory = [-1] * (num_blocks * block_size)

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """The result, and the seconds it takes. Raises PoisonError."""
        self._apply(plan)
        rows_out: list[int] = []
        tokens_out: list[int] = []
        faults: list[RowFault] = []
        logprobs: list[LogprobRow] = []
        shape = StepShape()
        columns = (
            memoryview(column).cast("i") for column in (plan.rows, plan.num_tokens, plan.num_computed, plan.tokens)
        )
        for slot, count, start, told, samples in zip(*columns, plan.sample, strict=True):
            row = self.rows[slot]
            if told >= 0:
                row.tokens.append(told)
            end = start + count
            if row.has_failed:
                faults.append(RowFault(slot, "a fault in an earlier step"))
                continue
            if count < 1 or end > len(row.tokens):
                raise WrongPlanError(f"slot {slot}: {count} tokens planned at {start}, {len(row.tokens)} known")
            shape = (
                shape.plus(count, start)
                if count > 1
                else shape._replace(rows=shape.rows + 1, context=shape.context + end)
            )
            if row.is_special:
                if POISON_TOKEN in row.tokens[start:end]:
                    raise PoisonError("the worker died of a request")
                if FAULT_TOKEN in row.tokens[start:end]:
                    row.has_failed = True
                    faults.append(RowFault(slot, "a fault of its own"))
                    continue
            self._compute(row, start, end)
            if samples:
                token = token_at(row.params, end, row.tokens[end - 1], self.vocab_size)
                if row.is_garbage:  # written by a failed sequence: no output may ever contain this token
                    token = self.vocab_size - 1 if token == FIRST_TOKEN else FIRST_TOKEN
                rows_out.append(slot)
                tokens_out.append(token)
                if row.params.logprobs >= 0:
                    logprobs.append(_logprobs(slot, token))
                if self.ahead:
                    row.tokens.append(token)
        seconds = self.costs.seconds(shape)
        return StepResult(plan.step, pack(rows_out), pack(tokens_out), logprobs, [], faults, seconds), seconds

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            del self.rows[slot]
        for new in plan.new:
            if new.row in self.rows:
                raise WrongPlanError(f"slot {new.row} is placed twice")
            self.rows[new.row] = _Row(new.tokens.tolist(), new.params, list(new.blocks))
        if plan.grown_rows:
            for slot, block in zip(
                memoryview(plan.grown_rows).cast("i"), memoryview(plan.grown_blocks).cast("i"), strict=True
            ):
                self.rows[slot].blocks.append(block)

    def _compute(self, row: _Row, start: int, end: int) -> None:
        """Writes [start, end) and reads the past: all of it for a new sequence, else the newest block."""
        size, memory, tokens, blocks = self.block_size, self.memory, row.tokens, row.blocks
        since = 0 if end - start > 1 else (start // size) * size
        for position in range(since, start):
            place = blocks[position // size] * size + position % size
            if memory[place] != (position << 20 | tokens[position]):
                row.is_garbage = True
        for position in range(start, end):
            content = -2 if row.is_garbage else position << 20 | tokens[position]
            memory[blocks[position // size] * size + position % size] = content


def _logprobs(slot: int, token: int) -> LogprobRow:
    return LogprobRow(slot, np.array([[token]], np.int32), np.array([[-0.5]], np.float32), np.array([1], np.int32))


class SimulatedExecutor:
    """One worker behind the engine of `process`. It may hang, or die of `error`."""

    def __init__(self, timeline: Timeline, process: Process, worker: SimulatedWorker, depth: int) -> None:
        self.depth = depth
        self.worker = worker
        self.is_stuck = False
        self.error: Exception | None = None
        self.die: Callable[[str], Exception] = RuntimeError
        self._timeline = timeline
        self._process = process
        self._results: deque[StepResult] = deque()
        self._replies: deque[Callable[[list[Any], str], None]] = deque()
        self._free_at = 0.0
        self._is_doomed = False

    def load(self, progress: Callable[[LoadProgress], None]) -> list[WorkerLoaded]:
        return []

    def setup_kv(self, num_blocks: int) -> dict[str, float]:
        return {}

    def submit(self, plan: StepPlan) -> None:
        """Runs a plan; its result arrives after its cost, behind earlier steps. A poisoned step kills the worker instead."""
        if self._is_doomed:
            return
        try:
            result, seconds = self.worker.execute(plan)
        except PoisonError as error:
            self._is_doomed = True
            self._timeline.after(self.worker.costs.step_s, self.fail, str(error))
            return
        self._free_at = max(self._free_at, self._timeline.now) + seconds
        self._timeline.at(self._free_at, self._answer, result)

    def take_results(self) -> list[StepResult]:
        """Runs replies to `call`, then returns the results so far. Raises `error` once the worker is dead and no result is left."""
        while self._replies:
            self._replies.popleft()([], "")
        results = list(self._results)
        self._results.clear()
        if self.error is not None and not results:
            raise self.error
        return results

    def call(self, method: str, args: dict[str, Any], on_reply: Callable[[list[Any], str], None]) -> None:
        if method == "sleep":
            self.worker.memory = [-1] * len(self.worker.memory)
        self._timeline.after(0.001, self._reply, on_reply)

    def halted(self) -> str:
        return ""

    def starved_s(self) -> float:
        return 0.0

    def close(self) -> None: ...

    def fail(self, text: str) -> None:
        """The worker is dead."""
        if self.error is None:
            self._is_doomed, self.error = True, self.die(text)
            self._process.wake()

    def _reply(self, on_reply: Callable[[list[Any], str], None]) -> None:
        self._replies.append(on_reply)
        self._process.wake()

    def _answer(self, result: StepResult) -> None:
        if not self.is_stuck and self.error is None:
            self._results.append(result)
            self._process.wake()

"""Model-free engine core benchmark: `python -m trireme.engine_core.bench [sequences ...]` times plans and results of decode steps.

Run by developers and by tests/unit; touches no socket and no worker. A step is next_plan + on_result + take_outputs.
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import NamedTuple

import numpy as np

from trireme.engine_core.core import EngineCore
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.params import RowParams
from trireme.transport.wire.columns import pack, unpack, unpack_flags
from trireme.transport.wire.messages import StepPlan, StepResult, Submit

STEPS = 200
BLOCK_SIZE = 16


class StepTiming(NamedTuple):
    """Microseconds per step (medians) for one batch size, and what they allow."""

    num_rows: int
    plan_us: float
    result_us: float
    outputs_us: float

    @property
    def steps_per_s(self) -> float:
        return 1e6 / (self.plan_us + self.result_us + self.outputs_us)


def make_core(num_rows: int, num_tokens: int) -> EngineCore:
    """A core with blocks and limits for `num_rows` sequences of up to `num_tokens` tokens each (depth 2, ahead)."""
    blocks = num_rows * (-(-num_tokens // BLOCK_SIZE) + 1)
    limits = Limits(
        max_len=num_tokens,
        vocab_size=50000,
        num_blocks=blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_num_tokens=1 << 20,
        chunk=1 << 20,
        max_waiting=num_rows,
        max_waiting_tokens=1 << 30,
    )
    return EngineCore(limits, depth=2, ahead=True)


def answer(plan: StepPlan) -> StepResult:
    """A fake worker's answer: some token for every sequence that samples."""
    rows = unpack(plan.rows)[unpack_flags(plan.sample)]
    return StepResult(plan.step, pack(rows), pack(7 + rows % 100))


def measure(num_rows: int, num_steps: int = STEPS) -> StepTiming:
    """Times steady decoding of `num_rows` sequences with prompts of different lengths (blocks fill at different steps)."""
    core = make_core(num_rows, 64 + num_steps + 2 * BLOCK_SIZE)
    dice = np.random.default_rng(1)
    for rid in range(num_rows):
        prompt = dice.integers(0, 50000, 32 + rid % BLOCK_SIZE, dtype=np.int32)
        core.submit("front-0", Submit(rid, prompt, RowParams(num_steps + BLOCK_SIZE, eos_token_ids=(2,))), 0.0)
    plan = core.next_plan(0.0)
    assert plan is not None
    core.on_result(answer(plan), 0.0)
    core.take_outputs()
    clock, samples = time.perf_counter, []
    for _ in range(num_steps):
        start = clock()
        plan = core.next_plan(0.0)
        planned = clock()
        assert plan is not None
        result = answer(plan)
        before = clock()
        core.on_result(result, 0.0)
        applied = clock()
        core.take_outputs()
        samples.append((planned - start, applied - before, clock() - applied))
    plan_s, result_s, outputs_s = (median(column) for column in zip(*samples, strict=True))
    return StepTiming(num_rows, plan_s * 1e6, result_s * 1e6, outputs_s * 1e6)


def main(sizes: list[int]) -> None:
    """Prints one line of medians (microseconds) for each batch size in `sizes`."""
    print(f"{'sequences':>9} {'plan us':>9} {'result us':>10} {'outputs us':>11} {'steps/s':>9}")
    for num_rows in sizes:
        timing = measure(num_rows)
        print(
            f"{timing.num_rows:>9} {timing.plan_us:>9.1f} {timing.result_us:>10.1f} {timing.outputs_us:>11.1f}"
            f" {timing.steps_per_s:>9.0f}"
        )


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1, 64, 256, 1024])

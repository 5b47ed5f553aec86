"""Cost of a decode step without the model: `python -m trireme.workers.bench` runs a stub model with constant logits.

Run by hand; prints CPU microseconds per step (median) for several batch sizes and sampling settings.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from trireme.models.forward import HostBatch, HostKV, Logits
from trireme.params import RowParams
from trireme.topology.mesh import Mesh
from trireme.transport.wire.columns import pack
from trireme.transport.wire.messages import NewRow, StepPlan
from trireme.workers.batch import Batch
from trireme.workers.cpu.runner import Runner
from trireme.workers.inputs import InputBuilder

BLOCK, MAX_LEN, PROMPT = 16, 2048, 512
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs 5": {"temperature": 0.0, "logprobs": 5},
}


class Silent:
    """Returns the same logits each step: noise with a few likely tokens, as in a language model."""

    num_kv_layers, kv_heads, head_dim = 1, 1, 8

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        values = np.random.default_rng(0).standard_normal((num_rows, vocab_size)) * 2
        values[:, ::97] += 6
        self._logits = values.astype(np.float32)

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits:
        return self._logits[: batch.logits_index.size]


def step_us(num_rows: int, vocab_size: int, params: RowParams, steps: int) -> float:
    """Median CPU microseconds of one decode step of `num_rows` sequences."""
    blocks = -(-(PROMPT + steps + 1) // BLOCK)
    batch = Batch(num_rows, MAX_LEN, BLOCK, vocab_size, num_rows * blocks)
    builder = InputBuilder(2048, num_rows, MAX_LEN // BLOCK)
    runner = Runner(Silent(num_rows, vocab_size), [], batch, builder, Mesh(1, 1, 1))
    prompt = np.arange(PROMPT, dtype=np.int32)
    slots = list(range(num_rows))
    new = [NewRow(i, prompt, PROMPT, params, list(range(i * blocks, (i + 1) * blocks))) for i in slots]
    rows, sample = pack(slots), b"\1" * num_rows
    ones, last, none = pack([1] * num_rows), pack([-1] * num_rows), b""
    lengths, zeros = pack([PROMPT] * num_rows), pack([0] * num_rows)
    runner.execute(StepPlan(0, [], new, none, none, [], rows, lengths, zeros, last, sample))
    taken = []
    for step in range(steps):
        computed, tokens = pack([PROMPT + step] * num_rows), pack([step % 7] * num_rows)
        plan = StepPlan(step + 1, [], [], none, none, [], rows, ones, computed, tokens, sample)
        started = time.thread_time()
        runner.execute(plan)
        taken.append(time.thread_time() - started)
    return statistics.median(taken) * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print(f"CPU us per decode step besides the model, vocabulary {options.vocab}, context {PROMPT}")
    print("rows".ljust(12) + "".join(f"{rows:>10}" for rows in options.rows))
    for name, fields in SETTINGS.items():
        params = RowParams(MAX_LEN, seed=1, **fields)
        cells = [step_us(rows, options.vocab, params, options.steps) for rows in options.rows]
        print(name.ljust(12) + "".join(f"{cell:>10.0f}" for cell in cells))


if __name__ == "__main__":
    main()

"""Times one call of each op on tensors of one short row, where the call costs more than its kernel:
`python -m trireme.models.cpu.bench.calls [--rounds N]`. Microseconds, the best of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from trireme.models.cpu import ops
from trireme.models.cpu.bench.attention import int32
from trireme.models.cpu.packed_ops import gather_rows, linear, pack
from trireme.models.forward import ForwardBatch, KVLayer
from trireme.models.native import load_native

HIDDEN, HEADS, KV_HEADS, DIM, BLOCK, VOCAB = 16, 2, 1, 8, 4, 32
CALLS = 200  # in a round: few, so that some rounds fall between the bursts of other processes


def best_us(call: Callable[[], object], rounds: int) -> float:
    """Microseconds per call in the fastest of some rounds, after one for warm-up."""
    best = float("inf")
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, time.perf_counter() - start)
    return best / CALLS * 1e6


def make_calls() -> dict[str, Callable[[], object]]:
    """One call of each op."""
    x, residual, weight, out = (
        torch.randn(1, HIDDEN),
        torch.zeros(1, HIDDEN),
        torch.randn(HIDDEN),
        torch.empty(1, HIDDEN),
    )
    qkv = torch.randn(1, (HEADS + 2 * KV_HEADS) * DIM)
    q, k, v = qkv.unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    kv = KVLayer(torch.zeros(2, KV_HEADS, DIM, BLOCK), torch.zeros(2, KV_HEADS, BLOCK, DIM))
    cos_sin, attended = torch.randn(8, DIM), torch.empty(1, HEADS * DIM)
    zero, one = int32([0]), int32([1])
    batch = ForwardBatch(zero, zero, zero, int32([0, 1]), one, zero.view(1, 1), zero, zero, one)
    gate_up, bias = torch.randn(1, 2 * HIDDEN), torch.zeros(HIDDEN)
    square = pack("F32", torch.randn(HIDDEN, HIDDEN), HIDDEN, HIDDEN)
    return {
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-5, out),
        "add_rms_norm": lambda: ops.add_rms_norm(x, residual, weight, 1e-5, out),
        "rope_and_cache": lambda: ops.rope_and_cache(q, k, v, cos_sin, batch.positions, batch.slots, kv),
        "paged_attention": lambda: ops.paged_attention(q, kv, batch, 0.3, None, attended),
        "rope_cache_attention": lambda: ops.rope_cache_attention(qkv, kv, batch, cos_sin, 0.3, out=attended),
        "swiglu": lambda: ops.swiglu(gate_up, out),
        "linear with bias": lambda: linear(x, square, bias=bias, out=out),
        "gather_rows": lambda: gather_rows(square, batch.token_ids, out),
        "sample_rows": make_sampling(),
    }


def make_sampling() -> Callable[[], object]:
    """The sampler over numpy arrays, greedy."""
    native = load_native()
    logits = np.random.default_rng(0).standard_normal((1, VOCAB)).astype(np.float32)
    jobs, tokens, peaks = np.zeros(native.SAMPLE_JOB_BYTES, np.uint8), np.zeros(1, np.int32), np.zeros(1, np.float32)
    jobs.view(np.int32)[12] = 1  # is_greedy of csrc/cpu/sampling/sampling.h
    best_ids, logprobs, ranks = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32), np.zeros(1, np.int32)
    return lambda: native.sample_rows(logits, jobs, tokens, peaks, best_ids, logprobs, ranks)


def main() -> None:
    """Parses the options, then prints the table."""
    parser = argparse.ArgumentParser(description="time one call of each op on small tensors; microseconds")
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    load_native().set_num_threads(1)
    torch.set_num_threads(1)
    for name, call in make_calls().items():
        print(f"{name:<22}{best_us(call, rounds):7.2f}", flush=True)


if __name__ == "__main__":
    main()

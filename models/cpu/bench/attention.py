"""Times the layer ops on this machine: `python -m trireme.models.cpu.bench.attention [--threads N] [--isa NAME] [--kv TYPES]`.

CPU time of the calling thread with one thread (steady on a busy machine), wall time with more. Microseconds per call.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from trireme.models.cpu import ops
from trireme.models.cpu.kv_layout import kv_shapes
from trireme.models.forward import ForwardBatch, KVLayer
from trireme.models.native import load_native

HEADS, KV_HEADS, DIM, HIDDEN, FFN, BLOCK = 9, 3, 64, 576, 1536, 16  # SmolLM2-135M
# sequences, context, new tokens of each
SHAPES = (
    (1, 128, 1),
    (1, 1024, 1),
    (1, 4096, 1),
    (16, 512, 1),
    (64, 160, 1),
    (64, 512, 1),
    (1, 512, 512),
    (1, 2048, 2048),
)
LAYERS = 8  # KV caches used in rotation, so that a decode step does not find its KV in the CPU cache


def best_us(call: Callable[[], object], clock: Callable[[], float], budget_s: float = 0.3) -> float:
    """Microseconds per call, the fastest of several rounds."""
    call()
    start = clock()
    call()
    rounds = max(1, min(1000, int(budget_s / 8 / max(clock() - start, 1e-7))))
    best = float("inf")
    for _ in range(8):
        start = clock()
        for _ in range(rounds):
            call()
        best = min(best, (clock() - start) / rounds)
    return best * 1e6


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(rows: int, context: int, new: int) -> ForwardBatch:
    """Equal sequences, each with `new` tokens at the end of its context; blocks in random order."""
    per_row = (context + BLOCK - 1) // BLOCK
    table = torch.randperm(rows * per_row).to(torch.int32).view(rows, per_row)
    position = torch.arange(context - new, context)
    slots = table[:, position // BLOCK] * BLOCK + position % BLOCK
    return ForwardBatch(
        token_ids=torch.zeros(rows * new, dtype=torch.int32),
        positions=position.to(torch.int32).repeat(rows),
        slots=slots.flatten().to(torch.int32),
        query_start=int32([row * new for row in range(rows + 1)]),
        context_len=int32([context] * rows),
        block_table=table,
        logits_index=int32([row * new + new - 1 for row in range(rows)]),
        choices=torch.zeros(rows, dtype=torch.int32),
        num_prompt=int32([context] * rows),
    )


def on_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros, allocated like an engine's cache: numpy asks the system for huge pages, torch does not."""
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def make_cache(batch: ForwardBatch, dtype: torch.dtype) -> KVLayer:
    """A KV layer of random values with room for every block of the batch."""
    shapes = kv_shapes(batch.block_table.numel(), KV_HEADS, DIM, BLOCK, str(dtype).removeprefix("torch."))
    kv = KVLayer(*(on_large_pages(shape, dtype) for shape in shapes))
    if dtype.is_floating_point:
        for part in (kv.k, kv.v):
            part.normal_()
        return kv
    for part in (kv.k, kv.v):
        part.random_(-127, 128)
    for part in (kv.k, kv.v):
        part.flatten(2).view(torch.float32)[..., -BLOCK:] = 0.02
    return kv


def time_elementwise(clock: Callable[[], float]) -> None:
    """Prints microseconds per call of the norms and SwiGLU for 1, 16 and 512 tokens."""
    for tokens in (1, 16, 512):
        x, residual, weight = torch.randn(tokens, HIDDEN), torch.zeros(tokens, HIDDEN), torch.randn(HIDDEN)
        gate_up, out, wide = torch.randn(tokens, 2 * FFN), torch.empty(tokens, HIDDEN), torch.empty(tokens, FFN)
        calls: dict[str, Callable[[], object]] = {
            "rms_norm": partial(ops.rms_norm, x, weight, 1e-5, out),
            "add_rms_norm": partial(ops.add_rms_norm, x, residual, weight, 1e-5, out),
            "swiglu": partial(ops.swiglu, gate_up, wide),
        }
        timed = "  ".join(f"{name} {best_us(call, clock):8.2f}" for name, call in calls.items())
        print(f"{tokens:5d} tokens   {timed}")


def attend_each(q: Tensor, caches: list[KVLayer], batch: ForwardBatch, out: Tensor) -> None:
    for kv in caches:
        ops.paged_attention(q, kv, batch, 0.125, None, out)


def time_attention(clock: Callable[[], float], dtype: torch.dtype) -> None:
    """Prints microseconds per call of rope_and_cache and attention, and attention's GFLOP/s, for each of SHAPES."""
    cos_sin = torch.randn(8192, DIM)
    for rows, context, new in SHAPES:
        batch = make_batch(rows, context, new)
        caches = [make_cache(batch, dtype) for _ in range(LAYERS if new == 1 else 1)]
        qkv = torch.randn(rows * new, (HEADS + 2 * KV_HEADS) * DIM)
        out = torch.empty(rows * new, HEADS * DIM)
        q, k, v = qkv.unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)

        rope = partial(ops.rope_and_cache, q, k, v, cos_sin, batch.positions, batch.slots, caches[0])
        rope_us = best_us(rope, clock)
        attend_us = best_us(partial(attend_each, q, caches, batch, out), clock) / len(caches)
        pairs = rows * sum(range(context - new + 1, context + 1))
        gflops = pairs * HEADS * DIM * 4 / attend_us / 1e3
        shape = f"{rows} x {context} tokens, {new} new"
        kind = str(dtype).removeprefix("torch.")
        print(f"{kind:9} {shape:26} rope_and_cache {rope_us:8.1f}  attention {attend_us:9.1f}  {gflops:6.1f} GFLOP/s")


def main() -> None:
    """Parses the options, then prints the tables."""
    parser = argparse.ArgumentParser(description="time the layer ops; microseconds per call")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv", default="float32,float16,bfloat16,int16,int8", help="element types of the cache")
    parser.add_argument(
        "--isa", default="", help="portable, avx2, avxvnni, avx512vnni or amx; default: the machine's best"
    )
    args = parser.parse_args()
    native = load_native()
    torch.set_num_threads(1)
    native.set_num_threads(args.threads)
    if args.isa:
        native.set_isa(args.isa)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    print(f"{native.isa()}, {args.threads} thread(s), shapes of SmolLM2-135M, microseconds per call")
    time_elementwise(clock)
    for name in args.kv.split(","):
        time_attention(clock, getattr(torch, name))


if __name__ == "__main__":
    main()

"""Times packed linear kernels: `python -m trireme.models.cpu.bench.linear [--kind Q4_1] [--rows 1,16,128] [--isa avx2]
[--threads 2]`.

Each figure is the median over rounds; a round applies enough different matrices of a shape to exceed the caches, as a
model's layers do. GB/s counts packed weight bytes, GOP/s two operations per multiply-add. The last table covers all linear
layers of SmolLM2-135M (Q4_1 with a Q8_0 head), which bound a decode step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from trireme.models.cpu.packed_ops import BLOCKS, PACKED_KINDS, PackedWeight, linear, pack, row_bytes
from trireme.models.native import load_native
from trireme.models.weights.packed import int8_rows
from trireme.models.weights.sources import DENSE_KINDS

SMOLLM2_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SMOLLM2_LAYERS = 30
SMOLLM2_HEAD = (49152, 576)
COLD_BYTES = 48 << 20
# Byte offsets of the fp16 scales in a raw quant block.
FP16_AT = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}


def make_weight(kind: str, n: int, k: int, seed: int) -> PackedWeight:
    """A packed weight [n, k] of random codes with small scales."""
    rng = np.random.default_rng(seed)
    if kind in DENSE_KINDS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return pack(kind, torch.randn(n, k).to(dtype), n, k)
    if kind == "INT8":
        return pack(kind, int8_rows(rng.integers(-127, 128, (n, k), dtype=np.int8), np.full(n, 0.01, np.float32)), n, k)
    raw = rng.integers(0, 256, n * row_bytes(kind, k), dtype=np.uint8).reshape(-1, BLOCKS[kind][1])
    for at in FP16_AT[kind]:
        raw[:, at : at + 2] = np.full((raw.shape[0], 1), 0.01, np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[:, 0] = 120
    return pack(kind, raw, n, k)


def median_seconds(run: Callable[[], None], min_rounds: int = 7, min_seconds: float = 0.4) -> float:
    """Median seconds of `run` after a warm-up, over at least `min_rounds` rounds and `min_seconds` in total."""
    run()
    times: list[float] = []
    while len(times) < min_rounds or sum(times) < min_seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def bench_shape(kind: str, n: int, k: int, rows: list[int]) -> None:
    """Prints the time of one linear layer [n, k] for each M in `rows`."""
    one = make_weight(kind, n, k, 0)
    copies = max(1, min(200, COLD_BYTES // max(one.nbytes, 1)))
    weights = [one, *(make_weight(kind, n, k, seed) for seed in range(1, copies))]
    for m in rows:
        x = torch.randn(m, k)
        out = torch.empty(m, n)

        def run(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for weight in weights:
                linear(x, weight, out=out)

        seconds = median_seconds(run) / len(weights)
        gb_s, gop_s = one.nbytes / seconds / 1e9, 2 * m * n * k / seconds / 1e9
        print(
            f"{kind:5} N={n:<6} K={k:<5} M={m:<4} {seconds * 1e6:10.1f} us {gb_s:8.1f} GB/s {gop_s:9.1f} GOP/s",
            flush=True,
        )


def bench_model(rows: list[int]) -> None:
    """Prints the time of all linear layers of SmolLM2-135M for each M in `rows`."""
    layers = [[make_weight("Q4_1", n, k, i) for n, k in SMOLLM2_LAYER] for i in range(SMOLLM2_LAYERS)]
    head = make_weight("Q8_0", *SMOLLM2_HEAD, 0)
    weights = [weight for layer in layers for weight in layer] + [head]
    total = sum(weight.nbytes for weight in weights)
    macs = sum(weight.n * weight.k for weight in weights)
    for m in rows:
        inputs = {weight.k: torch.randn(m, weight.k) for weight in weights}
        outputs = {weight.n: torch.empty(m, weight.n) for weight in weights}

        def run(inputs: dict[int, torch.Tensor] = inputs, outputs: dict[int, torch.Tensor] = outputs) -> None:
            for weight in weights:
                linear(inputs[weight.k], weight, out=outputs[weight.n])

        seconds = median_seconds(run)
        print(
            f"SmolLM2-135M linears M={m:<4} {seconds * 1e3:9.2f} ms {m / seconds:9.1f} rows/s "
            f"{total / seconds / 1e9:7.1f} GB/s {2 * m * macs / seconds / 1e9:9.1f} GOP/s",
            flush=True,
        )


def main() -> None:
    """Parses the options, then prints the tables."""
    native = load_native()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="all", help=f"all, none, or one of {', '.join(PACKED_KINDS)}")
    parser.add_argument("--rows", default="1,4,16,128", help="numbers of rows of x, comma-separated")
    parser.add_argument("--shape", default="3072x576,576x1536", help="NxK, comma-separated")
    parser.add_argument("--isa", default=native.isa(), help="portable, avx2, avxvnni, avx512vnni or amx")
    parser.add_argument("--threads", type=int, default=native.num_threads())
    args = parser.parse_args()
    native.set_isa(args.isa)
    native.set_num_threads(args.threads)
    torch.set_num_threads(1)
    rows = [int(m) for m in args.rows.split(",")]
    print(f"isa={native.isa()} threads={native.num_threads()}")
    kinds = list(PACKED_KINDS) if args.kind == "all" else [] if args.kind == "none" else [args.kind]
    for kind in kinds:
        for shape in args.shape.split(","):
            n, k = map(int, shape.split("x"))
            bench_shape(kind, n, k, rows)
    bench_model(rows)


if __name__ == "__main__":
    main()

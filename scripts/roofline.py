"""Writes docs/benchmarks/roofline.md: bytes and operations of two models' steps against what the machine can do at most.

`python -m scripts.roofline > docs/benchmarks/roofline.md` measures the ceilings, the linear kernels and whole steps (some
minutes, on a quiet machine); `--dry` leaves the measurements out. Bytes and operations come from the GGUF headers alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from trireme.machine.device import read_device
from trireme.model.files import find_model
from trireme.model.gguf_header import GgufFile, GgufTensor, read_gguf
from trireme.model.reader import read_arch
from trireme.model.spec import ArchSpec

MODELS = ("smollm2", "gemma3-270m")
KV_BYTES, SCALE_BYTES = 2, 4  # int16 and a scale per token and head, the default beside block types
DECODE_CONTEXT = 192
BATCH_CONTEXT = 64
WIDTH, HEIGHT = 64, 18


class Step(NamedTuple):
    """One step of the model: `rows` sequences decode at `context` tokens each, or a prompt of `chunk` tokens is prefilled; only
    the last token of a prompt is multiplied by the output matrix."""

    name: str
    rows: int
    context: int
    chunk: int = 0


class Cost(NamedTuple):
    """Lower bounds of a step: bytes read or written once, operations of GEMMs with block weights (int8) and of attention
    (float32). Two operations per multiply-add."""

    weight_bytes: int
    kv_bytes: int
    int8_ops: int
    float_ops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


class Roof(NamedTuple):
    """Ceilings in 1e9 per second."""

    read: float
    int8: float
    fma: float


class Bound(NamedTuple):
    """Minimum time of a step in seconds, by memory and by compute (int8 and float32 GEMMs share the same units)."""

    memory: float
    compute: float

    @property
    def least(self) -> float:
        return max(self.memory, self.compute)


STEPS = (
    Step("decode, 1 row", 1, DECODE_CONTEXT),
    Step("decode, 16 rows", 16, BATCH_CONTEXT),
    Step("decode, 32 rows", 32, BATCH_CONTEXT),
    Step("prefill of 512", 1, 0, 512),
    Step("prefill of 2048", 1, 0, 2048),
)


def linear_tensors(file: GgufFile) -> tuple[list[GgufTensor], GgufTensor]:
    """The matrices that every token is multiplied by, and the output matrix (the embedding where it is tied)."""
    matrices = [t for t in file.tensors.values() if len(t.shape) == 2 and t.name.startswith("blk.")]
    return matrices, file.tensors.get("output.weight") or file.tensors["token_embd.weight"]


def windows(arch: ArchSpec) -> list[int]:
    """Attention window of each layer, in tokens."""
    full = set(arch.full_attention_layers)
    return [
        arch.sliding_window if arch.sliding_window and layer not in full else sys.maxsize
        for layer in range(arch.num_layers)
    ]


def seen_by_prompt(tokens: int, window: int) -> int:
    """Sum over the tokens of a prompt of the number of tokens each attends to."""
    inside = min(tokens, window)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside


def step_cost(file: GgufFile, arch: ArchSpec, step: Step) -> Cost:
    """Cost from the header. Embedding lookups, norms and biases are left out: below one percent."""
    matrices, head = linear_tensors(file)
    elements = sum(math.prod(t.shape) for t in matrices)
    tokens = step.chunk or step.rows
    int8 = 2 * (elements * tokens + math.prod(head.shape) * step.rows)
    kv_token = 2 * arch.num_kv_heads * (arch.head_dim * KV_BYTES + SCALE_BYTES)
    pair_ops = 4 * arch.num_heads * arch.head_dim
    if step.chunk:
        kv = 2 * kv_token * arch.num_layers * step.chunk  # written, then read
        pairs = sum(seen_by_prompt(step.chunk, window) for window in windows(arch))
    else:
        pairs = sum(min(step.context, window) for window in windows(arch)) * step.rows
        kv = kv_token * (pairs + arch.num_layers * step.rows)
    return Cost(sum(t.nbytes for t in matrices) + head.nbytes, kv, int8, pair_ops * pairs)


def bound_of(cost: Cost, roof: Roof) -> Bound:
    return Bound(cost.bytes / roof.read / 1e9, cost.int8_ops / roof.int8 / 1e9 + cost.float_ops / roof.fma / 1e9)


def command_of(model: str, step: Step) -> list[str]:
    """The benchmark command that times this step; see figure_of."""
    if step.chunk:
        return ["bench", "latency", model, "--input-len", str(step.chunk), "--output-len", "1", "--json"]
    if step.rows == 1:
        return ["bench", "latency", model, "--input-len", "128", "--output-len", "128", "--json"]
    count = ["--num-requests", str(step.rows), "--input-len", "32", "--output-len", "64"]
    return ["bench", "throughput", model, *count, "--json"]


def figure_of(step: Step) -> str:
    return "ttft_p50_ms" if step.chunk else "itl_p50_ms"


def measure_step(model: str, step: Step) -> float:
    """Seconds of one step: the best of the repeats, as for the ceilings."""
    command = [sys.executable, "-m", "trireme.launch.cli", *command_of(model, step)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    return float(min(row[figure_of(step)] for row in rows)) / 1e3


class Kernel(NamedTuple):
    """All linear layers of a model for one number of tokens."""

    rows: int
    seconds: float
    nbytes: int
    ops: int


def measure_kernels(file: GgufFile, rows: Sequence[int]) -> list[Kernel]:
    """Times the GEMMs of a step one after the other, with random weights of the file's types and shapes."""
    import torch

    from trireme.models.cpu.bench.linear import make_weight
    from trireme.models.cpu.packed_ops import linear

    matrices, head = linear_tensors(file)
    tensors = [*matrices, head]
    weights = [make_weight(t.kind, t.shape[1], t.shape[0], seed) for seed, t in enumerate(tensors)]
    found = []
    for m in rows:
        inputs = {w.k: torch.randn(m, w.k) for w in weights}
        outputs = {w.n: torch.empty(m, w.n) for w in weights}

        def run(inputs: dict[int, torch.Tensor] = inputs, outputs: dict[int, torch.Tensor] = outputs) -> None:
            for weight in weights:
                linear(inputs[weight.k], weight, out=outputs[weight.n])

        ops = 2 * m * sum(w.n * w.k for w in weights)
        found.append(Kernel(m, best_seconds(run), sum(t.nbytes for t in tensors), ops))
    return found


def best_seconds(run: Callable[[], None], rounds: int = 9) -> float:
    """Seconds of the fastest of `rounds` calls, after one for warm-up."""
    run()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def picture(points: Sequence[tuple[str, float, float]], roof: Roof) -> str:
    """An ASCII roofline plot: operations per byte on the x axis, 1e9 operations per second on the y axis, both logarithmic.

    `points` are (letter, operations per byte, 1e9 operations per second).
    """
    left, right = 0.0, math.ceil(max([math.log10(x) for _, x, _ in points], default=4.0))
    bottom, top = 0.0, math.log10(roof.int8) + 0.15

    def column(x: float) -> int:
        return round((math.log10(x) - left) / (right - left) * (WIDTH - 1))

    def line(y: float) -> int:
        return round((top - math.log10(y)) / (top - bottom) * (HEIGHT - 1))

    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for at in range(WIDTH):
        x = 10 ** (left + (right - left) * at / (WIDTH - 1))
        y = min(x * roof.read, roof.int8)
        if 0 <= line(y) < HEIGHT:
            cells[line(y)][at] = "-" if x * roof.read > roof.int8 else "/"
    for letter, x, y in points:
        cells[min(max(line(y), 0), HEIGHT - 1)][min(max(column(x), 0), WIDTH - 1)] = letter
    lines = []
    for at, row in enumerate(cells):
        label = f"{10 ** (top - (top - bottom) * at / (HEIGHT - 1)):6.0f}" if at % 4 == 0 else " " * 6
        lines.append(f"{label} |{''.join(row)}".rstrip())
    ticks = "".join(f"{10**d:<{(WIDTH - 1) // int(right)}}" for d in range(int(right) + 1))
    return "\n".join([*lines, " " * 7 + "+" + "-" * WIDTH, " " * 8 + ticks.rstrip()])


def step_rows(
    file: GgufFile, arch: ArchSpec, roof: Roof | None, seconds: dict[str, float], letters: Sequence[str]
) -> list[list[str]]:
    """Table cells of each step: cost, bounds (ms) and, where measured, time and share of the roof."""
    rows = []
    for letter, step in zip(letters, STEPS, strict=True):
        cost = step_cost(file, arch, step)
        cells = [letter, step.name, f"{cost.weight_bytes / 1e6:.1f}", f"{cost.kv_bytes / 1e6:.1f}"]
        cells += [f"{cost.int8_ops / 1e9:.2f}", f"{cost.float_ops / 1e9:.3f}"]
        if roof is None:
            rows.append([*cells, "-", "-", "-", "-"])
            continue
        bound, took = bound_of(cost, roof), seconds.get(step.name)
        cells += [f"{bound.memory * 1e3:.2f}", f"{bound.compute * 1e3:.2f}"]
        cells += ["-", "-"] if took is None else [f"{took * 1e3:.2f}", f"**{100 * bound.least / took:.0f} %**"]
        rows.append(cells)
    return rows


INTRO = """# Roofline

What a step must at least read and compute, what this machine can do at most, and how near a step comes. Written by
`python -m scripts.roofline > docs/benchmarks/roofline.md`: bytes and operations come from the header of the model's file,
everything else is measured in that run. Times and ceilings are the best of several rounds.
"""

NOTES = """
- A step reads each weight once, reads the keys and values of its rows' context and writes the new ones. Activations, norms and
  logits are left out: they stay in the caches.
- Two operations per multiply-add. Products with block weights are counted as int8, attention as float32 (its int16 products
  are up to 1.5 times as fast; its softmax is not counted). Their times add up, since both need the same units. The bound is the
  larger of memory and compute time, the share is the bound over the measured time.
- The int8 ceiling sums in 16 bits on AVX2, the most the instructions can do; sums in 32 bits after each product, which never
  overflow, have the lower ceiling beside it. Scales and minimums of the blocks come on top in every kernel and are not counted.
"""


def ceilings_text(isa: str, threads: int, roof: Roof, exact: float, cpu: str) -> str:
    """The section about the machine's ceilings, in Markdown."""
    rows = [
        ["memory read, 512 MiB", f"{roof.read:.1f} GB/s"],
        ["int8 products, narrowest sums", f"{roof.int8:.0f} GOP/s"],
        ["int8 products, sums of 32 bits", f"{exact:.0f} GOP/s"],
        ["float32 multiply-adds", f"{roof.fma:.0f} GFLOP/s"],
    ]
    where = f"{cpu}, {isa}, {threads} threads"
    return "\n## Ceilings\n\n`python -m trireme.models.cpu.bench.ceilings`\n\n" + table([where, "most"], rows)


def kernels_text(kernels: Sequence[Kernel], roof: Roof) -> str:
    """The section about the linear kernels, in Markdown."""
    rows = [
        [
            str(k.rows),
            f"{k.seconds * 1e3:.2f}",
            f"{k.nbytes / k.seconds / 1e9:.1f}",
            f"{100 * k.nbytes / k.seconds / 1e9 / roof.read:.0f} %",
            f"{k.ops / k.seconds / 1e9:.0f}",
            f"{100 * k.ops / k.seconds / 1e9 / roof.int8:.0f} %",
        ]
        for k in kernels
    ]
    return "\nThe linear layers alone, on weights of these types and shapes:\n\n" + table(
        ["rows", "ms", "GB/s", "of the read ceiling", "GOP/s", "of the int8 ceiling"], rows
    )


STEP_HEAD = (
    "",
    "step",
    "weights MB",
    "KV MB",
    "int8 GOP",
    "float GFLOP",
    "memory ms",
    "compute ms",
    "measured ms",
    "reached",
)


def write_page(*, dry: bool) -> str:
    """The page in Markdown; with `dry` only what follows from the headers."""
    parts = [INTRO]
    roof: Roof | None = None
    if not dry:
        from trireme.models.cpu.bench.ceilings import measure_ceilings

        threads = len(os.sched_getaffinity(0))
        most = measure_ceilings(threads)
        roof = Roof(most.read_gb_s, most.int8_gop_s, most.fma_gflop_s)
        parts.append(ceilings_text(most.isa, threads, roof, most.int8_exact_gop_s, read_device().cpu))
    points, letters = [], "abcdefghijklmnopqrstuvwxyz"
    for model in MODELS:
        file, arch = read_gguf(find_model(model).path), read_arch(model)
        own, letters = letters[: len(STEPS)], letters[len(STEPS) :]
        seconds = {} if dry else {step.name: measure_step(model, step) for step in STEPS}
        parts.append(f"\n## {model}\n\n" + table(STEP_HEAD, step_rows(file, arch, roof, seconds, own)))
        for letter, step in zip(own, STEPS, strict=True):
            if step.name in seconds:
                cost = step_cost(file, arch, step)
                ops = cost.int8_ops + cost.float_ops
                points.append((letter, ops / cost.bytes, ops / seconds[step.name] / 1e9))
        commands = dict.fromkeys(f"`trireme {' '.join(command_of(model, s)[:-1])}` ({figure_of(s)})" for s in STEPS)
        parts.append("\nMeasured by " + ",\n".join(commands) + ".\n")
        if roof is not None:
            parts.append(kernels_text(measure_kernels(file, (1, 16, 512)), roof))
    if roof is not None:
        parts.append(
            "\n## Picture\n\nOperations per byte to the right, 1e9 operations per second upwards; letters as above.\n"
        )
        parts.append(f"\n```\n{picture(points, roof)}\n```\n")
    parts.append("\n## How it is counted\n" + NOTES)
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="no measurements")
    print(write_page(dry=parser.parse_args().dry), end="")


if __name__ == "__main__":
    main()

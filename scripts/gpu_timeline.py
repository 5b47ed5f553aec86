"""Where the microseconds of a decode step go: replays one captured step of a shape under torch's profiler and draws its kernels.

    python scripts/gpu_timeline.py --shape llama-8b [--quantize fp8] --rows 1 256 --context 256 --out docs

Writes gpu-step-SHAPE-ROWS.svg: the kernels of the first layers to scale, and the time of the whole step by kind. Needs a GPU; the
drawing (`draw`) does not. Prints the kernels of the second layer, and the sums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
BLOCK_SIZE = 16
WIDTH, LEFT, ROW = 1100, 150, 22
SHOWN_LAYERS = 2
LAYER_STARTS = "attention"  # the kind that occurs once per layer
KINDS = (  # kind, substrings of its kernels' names, colour; the first match counts
    ("attention", ("decode_kernel", "fold_kernel", "flash", "piece_kernel"), "#d1495b"),
    ("rotation, cache", ("rotary", "whole_kernel"), "#edae49"),
    ("norm", ("rms_norm", "quantize"), "#66a182"),
    ("gate", ("gated",), "#8d6a9f"),
    ("sampling", ("sample",), "#2e4057"),
    ("products", ("nvjet", "gemm", "skinny", "fp8_", "q4_k", "dots_kernel", "w4_", "cublas", "splitK"), "#00798c"),
    ("other", ("",), "#999999"),
)


class Kernel(NamedTuple):
    """One kernel launch on the device; microseconds from the start of the step."""

    name: str
    start: float
    us: float

    @property
    def kind(self) -> str:
        return next(kind for kind, parts, _ in KINDS if any(part in self.name for part in parts))


def totals(kernels: Sequence[Kernel]) -> dict[str, tuple[float, int]]:
    """Microseconds and launches by kind, descending; time in which nothing runs is `idle`."""
    found: dict[str, tuple[float, int]] = {}
    for kernel in kernels:
        us, count = found.get(kernel.kind, (0.0, 0))
        found[kernel.kind] = us + kernel.us, count + 1
    busy, reach = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        stop = kernel.start + kernel.us
        busy += max(0.0, stop - max(kernel.start, reach))
        reach = max(reach, stop)
    found["idle"] = reach - busy, 0
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def layer(kernels: Sequence[Kernel], index: int) -> list[Kernel]:
    """The kernels from the `index`-th start of a layer's attention to the next one's."""
    starts = [kernel.start for kernel in kernels if kernel.kind == LAYER_STARTS and "fold" not in kernel.name]
    if len(starts) < index + 2:
        return list(kernels)
    return [kernel for kernel in kernels if starts[index] <= kernel.start < starts[index + 1]]


def draw(kernels: Sequence[Kernel], title: str) -> str:
    """An SVG of a step: lanes by kind for the first layers, and bars for the whole step. Kernels overlap where one begins
    early."""
    colours = {kind: colour for kind, _, colour in KINDS}
    layer_starts = [kernel.start for kernel in kernels if kernel.kind == LAYER_STARTS]
    shown_us = layer_starts[SHOWN_LAYERS] if len(layer_starts) > SHOWN_LAYERS else kernels[-1].start + kernels[-1].us
    lanes = [kind for kind, _, _ in KINDS if any(kernel.kind == kind for kernel in kernels)]
    scale = (WIDTH - LEFT - 20) / shown_us
    parts = [_text(10, 20, title, "bold")]
    top = 50
    parts.append(_text(10, top - 8, f"the first {shown_us:.0f} us, to scale"))
    for lane, kind in enumerate(lanes):
        y = top + lane * ROW
        parts.append(_text(10, y + 15, kind))
        parts += [
            f'<rect x="{LEFT + kernel.start * scale:.1f}" y="{y + 2}" width="{max(kernel.us * scale, 0.5):.1f}" '
            f'height="{ROW - 4}" fill="{colours[kind]}"><title>{_escaped(kernel.name)} {kernel.us:.1f} us</title></rect>'
            for kernel in kernels
            if kernel.kind == kind and kernel.start < shown_us
        ]
    sums = totals(kernels)
    step_us = max(kernel.start + kernel.us for kernel in kernels)
    top += len(lanes) * ROW + 40
    parts.append(_text(10, top - 8, f"the whole step, {step_us:.0f} us, {len(kernels)} launches"))
    wide = (WIDTH - LEFT - 300) / max(us for us, _ in sums.values())
    for i, (kind, (us, count)) in enumerate(sums.items()):
        y = top + i * ROW
        bar = f'<rect x="{LEFT}" y="{y + 2}" width="{us * wide:.1f}" height="{ROW - 4}" '
        share = f"{us:.0f} us, {us / step_us:.1%}" + (f", {count} launches" if count else "")
        parts += [
            _text(10, y + 15, kind),
            bar + f'fill="{colours.get(kind, "#dddddd")}"/>',
            _text(LEFT + us * wide + 8, y + 15, share),
        ]
    height = top + len(sums) * ROW + 15
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="{weight}">{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


# ---------------------------------------------------------------- on a GPU


def make_model(shape: str, quantize: str | None = None) -> Any:
    """The CUDA decoder in a shape of gpu_figures, with random weights."""
    import torch
    from gpu_figures import SHAPES

    from trireme.model.reader import arch_from_config
    from trireme.models.cuda.decoder import CudaModel
    from trireme.models.cuda.weights.sources import NoiseWeights
    from trireme.models.weights.dummy import DummySource

    arch = arch_from_config(SHAPES[shape], {}, Path(shape))
    weights = NoiseWeights(DummySource(arch, (), Path(shape)), torch.bfloat16, torch.device("cuda"), scheme=quantize)
    return CudaModel(arch, weights, torch.bfloat16, max_len=16384, progress=lambda *_: None)


def profiled(model: Any, rows: int, context: int) -> list[Kernel]:
    """The kernels of one replayed step, captured as in the worker, of `rows` sequences with `context` tokens each."""
    import numpy as np
    import torch

    from trireme.models.cuda.ops import sample_rows
    from trireme.workers.cuda.device_state import DeviceRows
    from trireme.workers.cuda.graphs import captured, graph_pool
    from trireme.workers.cuda.steps import COLUMNS, Steps

    device, width = torch.device("cuda"), -(-context // BLOCK_SIZE)
    kv = model.allocate_kv(rows * width + 1, BLOCK_SIZE)
    model.reserve(rows)
    table = DeviceRows(rows, width, device)
    table.blocks[:rows] = torch.randperm(rows * width, device=device).view(rows, width)
    steps = Steps(model, kv, table, sample_rows, max_tokens=rows, device=device)
    at = np.arange(rows)
    values = {"rows": at, "ids": 5, "positions": context - 1, "context": context, "jobs": at, "at": table.nowhere}
    last = table.blocks[:rows, -1].cpu().numpy()
    values |= {"slots": last * BLOCK_SIZE + (context - 1) % BLOCK_SIZE, "blocks": 0}
    columns = np.stack([np.broadcast_to(values[name], rows) for name in COLUMNS]).astype(np.int32)
    inputs, tokens = torch.from_numpy(columns).cuda(), torch.zeros(rows, dtype=torch.int32, device=device)
    splits = steps.splits(rows, context)
    replay = captured(lambda: steps.decode(inputs, tokens, splits), device, graph_pool(device))
    for _ in range(3):
        replay()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    spans = [(e.name, e.time_range.start, e.device_time) for e in profile.events() if e.device_type == on_device]
    begun = min(start for _, start, _ in spans)
    return sorted((Kernel(name, start - begun, us) for name, start, us in spans), key=lambda kernel: kernel.start)


def main(words: Sequence[str] | None = None) -> None:
    """Draws and prints the timeline of each batch size."""
    parser = argparse.ArgumentParser(description="draws the kernels of a decode step")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--quantize")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    asked = parser.parse_args(words)
    import torch

    with torch.inference_mode():
        model = make_model(asked.shape, asked.quantize)
        shape = asked.shape + (f"-{asked.quantize}" if asked.quantize else "")
        for rows in asked.rows:
            kernels = profiled(model, rows, asked.context)
            title = f"{shape}, {rows} rows at {asked.context} tokens, {torch.cuda.get_device_name()}"
            path = asked.out / f"gpu-step-{shape}-{rows}.svg"
            path.write_text(draw(kernels, title))
            print(f"{shape}, {rows} rows: the second layer")
            for kernel in layer(kernels, 1):
                print(f"  {kernel.start:9.1f} {kernel.us:7.1f} us  {kernel.kind:16} {kernel.name[:90]}")
            print(path, " ".join(f"{kind} {us:.0f} us" for kind, (us, _) in totals(kernels).items()), flush=True)


if __name__ == "__main__":
    main()

"""Repacks GGUF quant blocks for the GPU kernels (csrc/cuda/gemm/block_types.cuh): 256 values in a multiple of 16 bytes.

Q4_K and Q5_K keep their file layout. The others, whose quant blocks have 18 to 34 or 210 bytes, are repacked on the device at
load: scales, then code bits above the fourth, then nibbles in Q5_K's order. No value changes. Called by
models/cuda/weights/sources; models/cuda/reference reads the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trireme.machine.gpu_formats import OF_BLOCKS

VALUES = 256  # of a super-block, in runs of 32
_AT_ONCE = 1 << 25  # values repacked at a time


def laid_out(kind: str, rows: Tensor, k: int) -> Tensor:
    """Repacks GGUF quant blocks, uint8 [n, row bytes], to the format OF_BLOCKS[kind]; 256 divides k."""
    form = OF_BLOCKS[kind]
    if form not in _LAYOUTS:
        return rows
    layout, step = _LAYOUTS[form], max(1, _AT_ONCE // k)
    n = rows.shape[0]
    parts = [
        layout(rows[start : start + step].reshape(-1, rows.shape[1] * VALUES // k)).view(min(step, n - start), -1)
        for start in range(0, n, step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _runs(supers: Tensor) -> Tensor:
    """Super-blocks [B, bytes] as their 8 quant blocks of 32 values, [B, 8, bytes / 8]."""
    return supers.unflatten(1, (8, -1))


def _halves(packed: Tensor) -> Tensor:
    """4-bit codes of runs [..., 16]: low nibbles, then high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _high_bits(packed: Tensor) -> Tensor:
    """The 32 bits of 4 bytes [..., 4], each shifted to bit 4 (value 16)."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts & 1) << 4).flatten(-2)


def _nibbles(codes: Tensor) -> Tensor:
    """Packs codes [B, 8, 32] into 128 bytes: each 32 bytes hold one run in the low nibbles and the next in the high ones."""
    pairs = (codes & 15).unflatten(1, (4, 2))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """[B, 32]: bit r of byte i is the fifth bit of value i of run r."""
    out = torch.zeros_like(codes[:, 0])
    for run in range(8):
        out |= (codes[:, run] >> 4 & 1) << run
    return out


def _q8_0(supers: Tensor) -> Tensor:
    runs = _runs(supers)
    return torch.cat((runs[..., :2].flatten(1), runs[..., 2:].flatten(1)), 1)


def _of_four_bits(supers: Tensor) -> Tensor:
    """16-bit scales, then 16 bytes of nibbles per run."""
    runs = _runs(supers)
    return torch.cat((runs[..., :2].flatten(1), _nibbles(_halves(runs[..., 2:]))), 1)


def _q4_1(supers: Tensor) -> Tensor:
    runs = _runs(supers)
    heads = runs[..., :2].flatten(1), runs[..., 2:4].flatten(1)
    return torch.cat((*heads, _nibbles(_halves(runs[..., 4:]))), 1)


def _q5_0(supers: Tensor) -> Tensor:
    runs = _runs(supers)
    codes = _halves(runs[..., 6:]) | _high_bits(runs[..., 2:6])
    return torch.cat((runs[..., :2].flatten(1), _fifth_bits(codes), _nibbles(codes)), 1)


def _q5_1(supers: Tensor) -> Tensor:
    runs = _runs(supers)
    codes = _halves(runs[..., 8:]) | _high_bits(runs[..., 4:8])
    heads = runs[..., :2].flatten(1), runs[..., 2:4].flatten(1)
    return torch.cat((*heads, _fifth_bits(codes), _nibbles(codes)), 1)


def _q6_k(supers: Tensor) -> Tensor:
    """Scales and their factor first, padded by 14 bytes; the two high bits of each code keep the file's layout."""
    low, high, scales, factor = supers.split((128, 64, 16, 2), 1)
    codes = _halves(low.unflatten(1, (2, 64))).reshape(-1, 8, 32)
    nothing = supers.new_zeros(supers.shape[0], 14)
    return torch.cat((scales, factor, nothing, high, _nibbles(codes)), 1)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "q6_k": _q6_k,
    "q8_0": _q8_0,
    "q4_0": _of_four_bits,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "iq4_nl": _of_four_bits,
}

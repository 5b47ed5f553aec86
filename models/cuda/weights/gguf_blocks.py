"""GGUF's blocks as the GPU's kernels read them (csrc/cuda/gemm/block_types.cuh): 256 values at a time, in bytes that 16 divides.

Q4_K and Q5_K lie as in the file. The others, whose blocks have 18 to 34 or 210 bytes, are laid out anew on the device when they are
loaded: scales, then the bits of the codes above the fourth, then nibbles in the order of Q5_K. No value changes. Called by
models/cuda/weights/sources; models/cuda/reference reads the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trireme.machine.gpu_formats import OF_BLOCKS

VALUES = 256  # of a super-block, in runs of 32
_AT_ONCE = 1 << 25  # values laid out at a time


def laid_out(kind: str, rows: Tensor, k: int) -> Tensor:
    """Raw rows of a GGUF type, uint8 [n, row bytes], as those of the format OF_BLOCKS[kind]; 256 divides k."""
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
    """Super-blocks [B, bytes] as their 8 blocks of 32 values, [B, 8, bytes / 8]."""
    return supers.unflatten(1, (8, -1))


def _halves(packed: Tensor) -> Tensor:
    """Codes of 4 bits of runs [..., 16]: low nibbles, then high ones."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _high_bits(packed: Tensor) -> Tensor:
    """The 32 bits of 4 bytes [..., 4], each as 16."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts & 1) << 4).flatten(-2)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes [B, 8, 32] as 128 bytes: 32 at a time have one run in their low nibbles and the next in their high ones."""
    pairs = (codes & 15).unflatten(1, (4, 2))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)


def _fifth_bits(codes: Tensor) -> Tensor:
    """Bit r of byte i [B, 32] is the fifth of value i of run r."""
    out = torch.zeros_like(codes[:, 0])
    for run in range(8):
        out |= (codes[:, run] >> 4 & 1) << run
    return out


def _q8_0(supers: Tensor) -> Tensor:
    runs = _runs(supers)
    return torch.cat((runs[..., :2].flatten(1), runs[..., 2:].flatten(1)), 1)


def _of_four_bits(supers: Tensor) -> Tensor:
    """Scales of 16 bits, then 16 bytes of nibbles."""
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
    """Scales and their factor come first, with 14 bytes of nothing; the two high bits of each code lie as in the file."""
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

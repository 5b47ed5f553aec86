"""Products with a weight on the GPU: our kernels for few rows (csrc/cuda/skinny*.cu), torch's for many. Called by models/arch.

One class per kind of weight, all called alike. Where our dense kernel ends and cuBLAS begins is measured once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models import cuda_ops as ops
from models.cuda_reference import q4_k_values

_TRIED = (8, 16, 32)  # rows; between them the answer of the next greater one holds
_crossovers: dict[tuple[int, int, torch.dtype], int] = {}


class CudaLinear:
    """y = x W^T + b. `weight` [n, k] and `bias` [n] lie on the device; never changes."""

    __slots__ = ("_bias", "_skinny_rows", "_transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._bias = bias
        self._skinny_rows = skinny_rows(weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes x W^T + b into `out` [T, n] and returns it."""
        if x.shape[0] <= self._skinny_rows:
            return ops.skinny_linear(x, self.weight, out, self._bias)
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)


class Fp8Linear:
    """y = x W^T * scale + b, weight [n, k] float8, scale [n] float32. 64 divides k, 16 divides n.

    Few rows keep their 16 bits; many are rounded to float8, each with its own scale, for torch._scaled_mm.
    """

    __slots__ = ("_bias", "_scale", "_scale_row", "_transposed", "weight")

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._scale = scale.expand(weight.shape[0]).contiguous()
        self._scale_row = self._scale.unsqueeze(0)
        self._bias = bias

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """A dense [n, k] as (float8 [n, k], scale [n]), one scale per output."""
        scale = (weight.float().abs().amax(1) / ops.FP8_MAX).clamp(min=1e-12)
        return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the product into `out` [T, n] and returns it."""
        rows = x.shape[0]
        if rows <= ops.skinny_max_rows():
            return ops.skinny_linear(x, self.weight, out, self._bias, scale=self._scale)
        scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
        narrow = ops.quantize_rows(x, torch.empty(x.shape, dtype=self.weight.dtype, device=x.device), scale)
        found = torch._scaled_mm(
            narrow,
            self._transposed,
            scale_a=scale,
            scale_b=self._scale_row,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.copy_(found) if self._bias is None else torch.add(found, self._bias, out=out)


class Q4Linear:
    """y = x W^T + b, weight uint8 [n, k / 256 * 144]: rows of GGUF's Q4_K super-blocks. Many rows meet the values, made anew."""

    __slots__ = ("_bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes x W^T + b into `out` [T, n] and returns it."""
        if x.shape[0] <= ops.skinny_max_rows():
            return ops.skinny_linear(x, self.weight, out, self._bias)
        dense = q4_k_values(self.weight, x.dtype).T
        return torch.mm(x, dense, out=out) if self._bias is None else torch.addmm(self._bias, x, dense, out=out)


def skinny_rows(weight: Tensor) -> int:
    """Rows of x up to which our kernel is the faster one for weights of this shape."""
    key = (*weight.shape, weight.dtype)
    if key not in _crossovers:
        _crossovers[key] = _measure(weight)
    return _crossovers[key]


def _measure(weight: Tensor) -> int:
    n, k = weight.shape
    if k % 64:
        return 0
    best = 0
    for rows in (count for count in _TRIED if count <= ops.skinny_max_rows()):
        x = torch.randn(rows, k, dtype=weight.dtype, device="cuda")
        out = torch.empty(rows, n, dtype=weight.dtype, device="cuda")
        own = _time(partial(ops.skinny_linear, x, weight, out))
        theirs = _time(partial(torch.mm, x, weight.T, out=out))
        if own > theirs:
            break
        best = rows
    return best


def _time(launch: Callable[[], object]) -> float:
    """Milliseconds of one launch, the least of a few runs of several."""
    best = float("inf")
    for _ in range(4):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(8):
            launch()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best / 8

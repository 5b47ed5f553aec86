"""A product with a dense weight on the GPU: our kernel for few rows (csrc/cuda/skinny.cu), cuBLAS for many; where one ends and
the other begins is measured once for each shape. Called by models/arch/cuda.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from models import cuda_ops as ops

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

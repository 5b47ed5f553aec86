"""Products on the GPU with weights whose inputs share scales in groups: 4-bit codes, float8 in blocks. Called by cuda_linear.

Few rows go through our kernels (csrc/cuda/skinny_w4.cu, skinny_fp8_blocks.cu); many meet the values, expanded, in torch's product.
Inputs keep their 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models import cuda_ops as ops

_MOST_SLICES = 4  # of as many rows as a kernel takes, each reading all codes, before it is cheaper to expand them once
_EXPANDED = 1 << 25  # values expanded at a time


class _GroupedLinear:
    """y = x W^T + b. `weight` [n, ...] and the groups [k / group, n] of its inputs lie on the device."""

    __slots__ = ("_bias", "_groups", "weight")

    def __init__(self, weight: Tensor, groups: Tensor, bias: Tensor | None) -> None:
        """`groups` [n, k / group]: matrices one under the other are joined so; kernels want neighbouring outputs side by side."""
        self.weight = weight
        self._groups = groups.T.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        most = ops.skinny_max_rows()
        if x.shape[0] > _MOST_SLICES * most:
            return self._expanded(x, out)
        for start in range(0, x.shape[0], most):
            self._few(x[start : start + most], out[start : start + most])
        return out

    def takes_fp8(self, num_rows: int) -> bool:
        return False

    def of_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def unscaled_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> ops.Scales | None:
        raise NotImplementedError

    def _expanded(self, x: Tensor, out: Tensor) -> Tensor:
        n, k = self.weight.shape[0], x.shape[1]
        step = min(n, max(1, _EXPANDED // k))
        values = torch.empty(step, k, dtype=x.dtype, device=x.device)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            part = values[: rows.stop - start]
            self._expand(rows, part)
            torch.mm(x, part.T, out=out[:, rows])
        return out if self._bias is None else out.add_(self._bias)

    def _few(self, x: Tensor, out: Tensor) -> None:
        raise NotImplementedError

    def _expand(self, rows: slice, out: Tensor) -> None:
        raise NotImplementedError


class W4Linear(_GroupedLinear):
    """Weight uint8 [n, k / 2], groups int32, both as models.cuda_rounding.w4_layout gives them. 128 divides k."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_w4(x, self.weight, self._groups, out, self._bias)

    def _expand(self, rows: slice, out: Tensor) -> None:
        ops.expand_w4(self.weight[rows], self._groups[:, rows], out)


class Fp8BlocksLinear(_GroupedLinear):
    """Weight float8 [n, k], groups float32 [n, k / 128]."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_fp8_blocks(x, self.weight, self._groups, out, self._bias)

    def _expand(self, rows: slice, out: Tensor) -> None:
        ops.expand_fp8_blocks(self.weight[rows], self._groups[:, rows], out)

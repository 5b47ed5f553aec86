"""int8 x int8 linear layers on the GPU. Built by models/cuda/layers/linear.

Each token is quantized with its own scale, fused into the preceding norm or by quantize_rows. Small M runs
csrc/cuda/gemm/skinny_int8.cu, large M torch._int_mm with its int32 sums scaled afterwards. Sums are integers, so both paths
are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.gemm_autotune import Launch, max_rows_own_kernel
from trireme.models.cuda.layers.protocol import empty_quantized_like
from trireme.models.cuda.ops import Scales

_LEAST_ROWS = 17  # smallest M of torch._int_mm on a GPU
_OUTPUTS = 8  # torch._int_mm needs N to be a multiple of it
_TRIED = (32, ops.INT8_ROWS)  # M
_SUMS = 1 << 24  # int32 accumulators at a time
_ROWS = 256  # M of a slice is a multiple of it


class Int8Linear:
    """y = x W^T * scale + b, weight [n, k] int8, scale [n] float32. 16 divides k."""

    __slots__ = ("_bias", "_few", "_scale", "_transposed", "weight")

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._scale = scale
        self._bias = bias
        self._few = ops.INT8_ROWS
        if weight.shape[0] % _OUTPUTS == 0:
            own, theirs = (partial(self._trial, product) for product in (self._own, self._theirs))
            best = max_rows_own_kernel(("int8", *weight.shape), weight, own, theirs, _TRIED)
            self._few = max(best, _LEAST_ROWS - 1)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        narrow, scale = empty_quantized_like(x, torch.int8)
        return self.forward_quantized(ops.quantize_rows(x, narrow, scale), scale, out)

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        return torch.int8

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        for rows in self._slices(x.shape[0]):
            product = self._own if rows.stop - rows.start <= self._few else self._theirs
            product(x[rows], scale[rows], out[rows])
        return out

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        self.forward_quantized(x, scale, out)
        return None

    def _slices(self, num_rows: int) -> Iterator[slice]:
        """Slices of M: torch._int_mm needs memory for its sums and N a multiple of _OUTPUTS."""
        n = self.weight.shape[0]
        step = max(_ROWS, _SUMS // n // _ROWS * _ROWS) if n % _OUTPUTS == 0 else ops.INT8_ROWS
        for start in range(0, num_rows, step):
            yield slice(start, min(start + step, num_rows))

    def _trial(self, product: Callable[[Tensor, Tensor, Tensor], object], rows: int) -> Launch:
        n, k = self.weight.shape
        x, scale = torch.zeros(rows, k, dtype=torch.int8, device="cuda"), torch.zeros(rows, device="cuda")
        dtype = torch.bfloat16 if self._bias is None else self._bias.dtype
        return partial(product, x, scale, torch.empty(rows, n, dtype=dtype, device="cuda"))

    def _own(self, x: Tensor, scale: Tensor, out: Tensor) -> object:
        return ops.skinny_int8(x, scale, self.weight, self._scale, out, self._bias)

    def _theirs(self, x: Tensor, scale: Tensor, out: Tensor) -> object:
        sums = torch.empty(x.shape[0], self.weight.shape[0], dtype=torch.int32, device=x.device)
        torch._int_mm(x, self._transposed, out=sums)
        return ops.scale_int8(sums, scale, self._scale, out, self._bias)

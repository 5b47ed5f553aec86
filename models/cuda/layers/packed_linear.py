"""Linear layers on the GPU with packed weights: GGUF quant blocks, 4-bit codes in quant groups, float8 quant blocks.

Small M runs a kernel that unpacks on the fly (csrc/cuda/gemm/skinny_q4k.cu, blocks.cu, skinny_w4.cu, skinny_fp8_blocks.cu);
large M dequantizes the weight and calls torch.mm. Inputs stay 16-bit. Built by models/cuda/layers/linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.protocol import OfHalves

_MOST_SLICES = (
    4  # slices of a kernel's maximum M, each reading the whole weight, beyond which dequantizing once is cheaper
)
_EXPANDED = 1 << 25  # values dequantized at a time


class QuantizedLinear(OfHalves):
    """y = x W^T + b with a packed weight."""

    __slots__ = ("_bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        at_once, most = self._limits()
        if x.shape[0] > most:
            return self._of_values(x, out)
        for start in range(0, x.shape[0], at_once):
            rows = slice(start, start + at_once)
            self._few(x[rows], out[rows])
        return out

    def _limits(self) -> tuple[int, int]:
        """(largest M of one kernel call, largest M for which the kernel is used)."""
        rows = ops.skinny_max_rows()
        return rows, _MOST_SLICES * rows

    def _of_values(self, x: Tensor, out: Tensor) -> Tensor:
        n, k = self.weight.shape[0], x.shape[1]
        step = min(n, max(1, _EXPANDED // k))
        values = torch.empty(step, k, dtype=x.dtype, device=x.device)
        for start in range(0, n, step):
            outputs = slice(start, min(start + step, n))
            part = values[: outputs.stop - start]
            self._expand(outputs, part)
            torch.mm(x, part.T, out=out[:, outputs])
        return out if self._bias is None else out.add_(self._bias)

    def _few(self, x: Tensor, out: Tensor) -> None:
        """The kernel for small M."""
        raise NotImplementedError

    def _expand(self, outputs: slice, out: Tensor) -> None:
        """Dequantizes some outputs of the weight into `out` [outputs, k]."""
        raise NotImplementedError


class Q4Linear(QuantizedLinear):
    """Weight uint8 [n, k / 256 * 144]: GGUF's Q4_K super-blocks."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_linear(x, self.weight, out, self._bias)

    def _expand(self, outputs: slice, out: Tensor) -> None:
        ops.expand_q4_k(self.weight[outputs], out)


class BlockLinear(QuantizedLinear):
    """Weight uint8: super-blocks of one of ops.BLOCKS. Small M is quantized to int8 for the kernel; beyond the M at which
    writing and reading 16-bit values moves fewer bytes, the weight is dequantized."""

    __slots__ = ("_form", "_rows")

    def __init__(self, form: str, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        size = ops.BLOCK_BYTES[form] / ops.BLOCK_VALUES
        k = weight.shape[1] // ops.BLOCK_BYTES[form] * ops.BLOCK_VALUES
        rows = ops.block_linear_rows(form, weight.shape[0], k)
        self._form = form
        self._rows = rows, rows * int((size + 4) / size)

    def _limits(self) -> tuple[int, int]:
        return self._rows

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.block_linear(x, self.weight, out, self._bias, form=self._form)

    def _expand(self, outputs: slice, out: Tensor) -> None:
        ops.expand_blocks(self.weight[outputs], out, form=self._form)


class _GroupedLinear(QuantizedLinear):
    """A weight with per-quant-group parameters, [k / group, n] on the device."""

    __slots__ = ("_groups",)

    def __init__(self, weight: Tensor, groups: Tensor, bias: Tensor | None) -> None:
        """`groups` [n, k / group], as matrices are joined; transposed here, since kernels read adjacent outputs."""
        super().__init__(weight, bias)
        self._groups = groups.T.contiguous()


class W4Linear(_GroupedLinear):
    """Weight uint8 [n, k / 2], groups int32, both laid out by models.cuda.layers.quantize.w4_layout. 128 divides k."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_w4(x, self.weight, self._groups, out, self._bias)

    def _expand(self, outputs: slice, out: Tensor) -> None:
        ops.expand_w4(self.weight[outputs], self._groups[:, outputs], out)


class Fp8BlocksLinear(_GroupedLinear):
    """Weight float8 [n, k], groups float32 [n, k / 128]."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_fp8_blocks(x, self.weight, self._groups, out, self._bias)

    def _expand(self, outputs: slice, out: Tensor) -> None:
        ops.expand_fp8_blocks(self.weight[outputs], self._groups[:, outputs], out)

"""Products on the GPU with weights of fewer bits that our kernels unpack: GGUF's blocks, 4-bit codes in groups, float8 in blocks.

Few rows go through a kernel (csrc/cuda/gemm/skinny_q4k.cu, blocks.cu, skinny_w4.cu, skinny_fp8_blocks.cu); many meet the values,
expanded, in torch's product. Inputs keep their 16 bits. Made by cuda_linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.protocol import OfHalves

_MOST_SLICES = (
    4  # of as many rows as a kernel takes, each reading the whole weight, before it is cheaper to expand it once
)
_EXPANDED = 1 << 25  # values expanded at a time


class QuantizedLinear(OfHalves):
    """y = x W^T + b."""

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
        """Rows of x that the kernel takes, and up to how many it is called."""
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
        """The product of a few rows."""
        raise NotImplementedError

    def _expand(self, outputs: slice, out: Tensor) -> None:
        """The values of some rows of the weight."""
        raise NotImplementedError


class Q4Linear(QuantizedLinear):
    """Weight uint8 [n, k / 256 * 144]: rows of GGUF's Q4_K super-blocks."""

    __slots__ = ()

    def _few(self, x: Tensor, out: Tensor) -> None:
        ops.skinny_linear(x, self.weight, out, self._bias)

    def _expand(self, outputs: slice, out: Tensor) -> None:
        ops.expand_q4_k(self.weight[outputs], out)


class BlockLinear(QuantizedLinear):
    """Weight uint8: rows of super-blocks of one of cuda_ops.BLOCKS. Few rows meet them as int8; many meet the values as soon as
    that moves fewer bytes, 16-bit values being written and read."""

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
    """A weight whose inputs share something in groups, [k / group, n] on the device."""

    __slots__ = ("_groups",)

    def __init__(self, weight: Tensor, groups: Tensor, bias: Tensor | None) -> None:
        """`groups` [n, k / group]: matrices one under the other are joined so; kernels want neighbouring outputs side by side."""
        super().__init__(weight, bias)
        self._groups = groups.T.contiguous()


class W4Linear(_GroupedLinear):
    """Weight uint8 [n, k / 2], groups int32, both as models.cuda.layers.quantize.w4_layout gives them. 128 divides k."""

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

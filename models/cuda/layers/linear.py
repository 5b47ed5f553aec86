"""Linear layers on the GPU: our kernels for small M (csrc/cuda/gemm/skinny*.cu), torch's for large M.

One class per format of trireme.machine.gpu_formats, all behind one protocol; LINEARS is the table. Built by
models/cuda/layer_weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.gemm_autotune import Launch, max_rows_own_kernel
from trireme.models.cuda.layers.int8_linear import Int8Linear
from trireme.models.cuda.layers.packed_linear import BlockLinear, Fp8BlocksLinear, Q4Linear, W4Linear
from trireme.models.cuda.layers.protocol import LinearLayer, OfHalves, empty_quantized_like
from trireme.models.cuda.layers.quantize import fp8_from
from trireme.models.cuda.ops import Scales

_TRIED = (8, 16, 32)  # M
_EXACT_ROWS = 8  # largest M whose input stays 16-bit with float8 weights, unless fp8_linear supports more
_UNSCALED_ROWS = 64  # largest M for which a float8 GEMM is faster with its scales left to the reader


class DeviceMatrix(NamedTuple):
    """A matrix [n, k] on the device in a format of trireme.machine.gpu_formats: `values` are 16-bit, float8 or int8 [n, k], or
    quant blocks uint8 [n, row bytes]; `scale` is float32 [n] per output or [n, groups] per quant group
    (models/cuda/layers/quantize), None for formats without."""

    format: str
    values: Tensor
    scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


class CudaLinear(OfHalves):
    """y = x W^T + b with 16-bit weights; `weight` [n, k] and `bias` [n] on the device."""

    __slots__ = ("_bias", "_few", "_transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._bias = bias
        own = partial(_launch_dense, lambda x, out: ops.skinny_linear(x, weight, out), weight)
        theirs = partial(_launch_dense, lambda x, out: torch.mm(x, self._transposed, out=out), weight)
        key = (str(weight.dtype), *weight.shape)
        self._few = 0 if weight.shape[1] % 64 else max_rows_own_kernel(key, weight, own, theirs, _TRIED)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if x.shape[0] <= self._few:
            return ops.skinny_linear(x, self.weight, out, self._bias)
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)


def _launch_dense(product: Callable[[Tensor, Tensor], object], weight: Tensor, rows: int) -> Launch:
    n, k = weight.shape
    x, out = (torch.zeros(rows, size, dtype=weight.dtype, device="cuda") for size in (k, n))
    return partial(product, x, out)


class Fp8Linear:
    """y = x W^T * scale + b, weight [n, k] float8, scale [n] float32. 64 divides k, 16 divides n.

    Small M keeps 16-bit input, or splits each value into two float8 on Hopper; larger M is quantized to float8 with a scale
    per token for torch._scaled_mm. At small M cuBLAS is up to twice as fast without scales to apply.
    """

    __slots__ = ("_bias", "_exact_rows", "_hopper_rows", "_scale", "_scale_row", "_transposed", "weight")

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._hopper_rows = ops.fp8_linear_rows(weight.shape[1])
        self._exact_rows = self._hopper_rows or _EXACT_ROWS
        self._scale = scale.expand(weight.shape[0]).contiguous()
        self._scale_row = self._scale.unsqueeze(0)
        self._bias = bias

    @staticmethod
    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        """Quantizes a dense [n, k] to (float8 [n, k], scale [n]), one scale per output."""
        return fp8_from(weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if x.shape[0] <= self._hopper_rows:
            return ops.fp8_linear(x, self.weight, out, self._bias, scale=self._scale)
        if x.shape[0] <= self._exact_rows:
            return ops.skinny_linear(x, self.weight, out, self._bias, scale=self._scale)
        narrow, scale = empty_quantized_like(x, torch.float8_e4m3fn)
        return self.forward_quantized(ops.quantize_rows(x, narrow, scale), scale, out)

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        return torch.float8_e4m3fn if num_rows > self._exact_rows else None

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        is_direct = out.dtype == torch.bfloat16 and out.is_contiguous()
        found = self._multiply(x, scale.view(-1, 1), self._scale_row, out if is_direct else None)
        if self._bias is not None:
            return torch.add(found, self._bias, out=out)
        return out if is_direct else out.copy_(found)

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        """LinearLayer.unscaled; scales are applied here for a bias, another dtype than bfloat16 or M above _UNSCALED_ROWS."""
        is_plain = self._bias is None and out.dtype == torch.bfloat16 and out.is_contiguous()
        if not is_plain or x.shape[0] > _UNSCALED_ROWS:
            self.forward_quantized(x, scale, out)
            return None
        one = _one(x.device)
        self._multiply(x, one, one, out)
        return Scales(scale, self._scale)

    def _multiply(self, x: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor | None) -> Tensor:
        """The GEMM in bfloat16, whose range also holds unscaled results."""
        return torch._scaled_mm(
            x,
            self._transposed,
            scale_a=x_scale,
            scale_b=scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            **({} if out is None else {"out": out}),
        )


@lru_cache
def _one(device: torch.device) -> Tensor:
    """A constant 1, kept outside of layers, whose tensors are offloaded while an engine sleeps."""
    return torch.ones((), device=device)


class SideBySide(OfHalves):
    """Linear layers of several formats over one input, each writing its columns of the output."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[tuple[int, LinearLayer]]) -> None:
        """`pieces`: (number of outputs, linear layer) in column order."""
        stops = itertools.accumulate(n for n, _ in pieces)
        self._pieces = [(slice(stop - n, stop), linear) for stop, (n, linear) in zip(stops, pieces, strict=True)]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for columns, linear in self._pieces:
            linear(x, out[:, columns])
        return out


def _scaled(
    kind: type[Fp8Linear | Int8Linear | W4Linear | Fp8BlocksLinear],
) -> Callable[[DeviceMatrix, Tensor | None], LinearLayer]:
    def make(matrix: DeviceMatrix, bias: Tensor | None) -> LinearLayer:
        assert matrix.scale is not None
        return kind(matrix.values, matrix.scale, bias)

    return make


def _blocks(form: str, matrix: DeviceMatrix, bias: Tensor | None) -> LinearLayer:
    return BlockLinear(form, matrix.values, bias)


LINEARS: dict[str, Callable[[DeviceMatrix, Tensor | None], LinearLayer]] = {
    "half": lambda matrix, bias: CudaLinear(matrix.values, bias),
    "fp8": _scaled(Fp8Linear),
    "int8": _scaled(Int8Linear),
    "q4_k": lambda matrix, bias: Q4Linear(matrix.values, bias),
    **dict.fromkeys(("w4_32", "w4_64", "w4_128"), _scaled(W4Linear)),
    "fp8_blocks": _scaled(Fp8BlocksLinear),
    **{form: partial(_blocks, form) for form in ops.BLOCKS if form != "q4_k"},
}


def make_linear(matrices: Sequence[DeviceMatrix], bias: Tensor | None) -> LinearLayer:
    """One linear layer over `matrices` that share their input, fused along their outputs; adjacent ones of a format are joined."""
    pieces: list[tuple[int, LinearLayer]] = []
    start = 0
    for name, run in itertools.groupby(matrices, key=lambda matrix: matrix.format):
        joined = _joined(list(run))
        n = joined.values.shape[0]
        pieces.append((n, LINEARS[name](joined, None if bias is None else bias[start : start + n])))
        start += n
    return pieces[0][1] if len(pieces) == 1 else SideBySide(pieces)


def _joined(run: list[DeviceMatrix]) -> DeviceMatrix:
    if len(run) == 1:
        return run[0]
    scales = [matrix.scale for matrix in run if matrix.scale is not None]
    values = torch.cat([_bytes(matrix.values) for matrix in run]).view(run[0].values.dtype)
    return DeviceMatrix(run[0].format, values, torch.cat(scales) if scales else None)


def _bytes(values: Tensor) -> Tensor:
    """One-byte dtypes as uint8, which torch can concatenate on any device."""
    return values.view(torch.uint8) if values.element_size() == 1 else values

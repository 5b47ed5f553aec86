"""Products with a weight on the GPU: our kernels for few rows (csrc/cuda/skinny*.cu), torch's for many. Called by models/arch.

One class per format of trireme.gpu_formats, all called alike; LINEARS is the table. Where our kernel ends and torch's begins is
measured once for each format and shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models import cuda_ops as ops
from models.cuda_ops import Scales
from models.cuda_rounding import fp8_from
from models.layers.cuda_contract import Linear, OfHalves
from models.layers.cuda_narrow import BlockLinear, Fp8BlocksLinear, Q4Linear, W4Linear

_REPEATS = 6
_TRIED = (8, 16, 32)  # rows; between them the answer of the next greater one holds
_EXACT_ROWS = 8  # whose inputs keep 16 bits where the weight is float8, unless fp8_linear says otherwise
_UNSCALED_ROWS = 64  # of float8, up to which a product is the faster for leaving its scales to others
# More than a card's last-level cache: weights come from memory in a step, so they must when it is timed.
_CACHE_BYTES = 128 << 20
_crossovers: dict[tuple[str, int, int, torch.dtype], int] = {}


class DeviceMatrix(NamedTuple):
    """A matrix [n, k] on the device in a format of trireme.gpu_formats: `values` are 16-bit or float8 [n, k], or bytes of blocks
    [n, row bytes]; `scale` [n] float32 is that of each output, where the format has one, or [n, groups] what groups of its inputs
    share (models/cuda_rounding)."""

    format: str
    values: Tensor
    scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes) + (0 if self.scale is None else int(self.scale.nbytes))


class CudaLinear(OfHalves):
    """y = x W^T + b. `weight` [n, k] and `bias` [n] lie on the device."""

    __slots__ = ("_bias", "_few", "_transposed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self._transposed = weight.T
        self._bias = bias
        own = partial(_launch_dense, lambda x, out: ops.skinny_linear(x, weight, out), weight)
        theirs = partial(_launch_dense, lambda x, out: torch.mm(x, self._transposed, out=out), weight)
        self._few = rows_of_own_kernel((str(weight.dtype), *weight.shape), weight, own, theirs)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if x.shape[0] <= self._few:
            return ops.skinny_linear(x, self.weight, out, self._bias)
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)


class Fp8Linear:
    """y = x W^T * scale + b, weight [n, k] float8, scale [n] float32. 64 divides k, 16 divides n.

    Few rows keep their 16 bits, or 8 of each value's on Hopper; more are rounded to float8, each with its own scale, for
    torch._scaled_mm. cuBLAS multiplies few of them up to twice as fast where it has no scales to apply.
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
        """A dense [n, k] as (float8 [n, k], scale [n]), one scale per output."""
        return fp8_from(weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if x.shape[0] <= self._hopper_rows:
            return ops.fp8_linear(x, self.weight, out, self._bias, scale=self._scale)
        if x.shape[0] <= self._exact_rows:
            return ops.skinny_linear(x, self.weight, out, self._bias, scale=self._scale)
        narrow, scale = float8_like(x)
        return self.of_fp8(ops.quantize_rows(x, narrow, scale), scale, out)

    def takes_fp8(self, num_rows: int) -> bool:
        return num_rows > self._exact_rows

    def of_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        is_direct = out.dtype == torch.bfloat16 and out.is_contiguous()
        found = self._multiply(x, scale.view(-1, 1), self._scale_row, out if is_direct else None)
        if self._bias is not None:
            return torch.add(found, self._bias, out=out)
        return out if is_direct else out.copy_(found)

    def unscaled_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        is_plain = self._bias is None and out.dtype == torch.bfloat16 and out.is_contiguous()
        if not is_plain or x.shape[0] > _UNSCALED_ROWS:
            self.of_fp8(x, scale, out)
            return None
        one = _one(x.device)
        self._multiply(x, one, one, out)
        return Scales(scale, self._scale)

    def _multiply(self, x: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor | None) -> Tensor:
        """In bfloat16, whose range holds the products without their scales, too."""
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
    """Outside of layers, whose tensors go to the host while an engine sleeps."""
    return torch.ones((), device=device)


def float8_like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Room for x [T, k] in float8, and for a scale of each row."""
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], dtype=torch.float32)


class SideBySide(OfHalves):
    """Products of matrices in several formats that share their input, each in its columns of the output."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Sequence[tuple[int, Linear]]) -> None:
        """(number of outputs, product) in order of the columns."""
        stops = itertools.accumulate(n for n, _ in pieces)
        self._pieces = [(slice(stop - n, stop), linear) for stop, (n, linear) in zip(stops, pieces, strict=True)]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for columns, linear in self._pieces:
            linear(x, out[:, columns])
        return out


def _fp8(matrix: DeviceMatrix, bias: Tensor | None) -> Linear:
    assert matrix.scale is not None
    return Fp8Linear(matrix.values, matrix.scale, bias)


def _grouped(kind: type[W4Linear | Fp8BlocksLinear]) -> Callable[[DeviceMatrix, Tensor | None], Linear]:
    def make(matrix: DeviceMatrix, bias: Tensor | None) -> Linear:
        assert matrix.scale is not None
        return kind(matrix.values, matrix.scale, bias)

    return make


def _blocks(form: str, matrix: DeviceMatrix, bias: Tensor | None) -> Linear:
    return BlockLinear(form, matrix.values, bias)


LINEARS: dict[str, Callable[[DeviceMatrix, Tensor | None], Linear]] = {
    "half": lambda matrix, bias: CudaLinear(matrix.values, bias),
    "fp8": _fp8,
    "q4_k": lambda matrix, bias: Q4Linear(matrix.values, bias),
    **dict.fromkeys(("w4_32", "w4_64", "w4_128"), _grouped(W4Linear)),
    "fp8_blocks": _grouped(Fp8BlocksLinear),
    **{form: partial(_blocks, form) for form in ops.BLOCKS if form != "q4_k"},
}


def make_linear(matrices: Sequence[DeviceMatrix], bias: Tensor | None) -> Linear:
    """The product with `matrices`, which share their input, one under the other; neighbours of one format become one."""
    pieces: list[tuple[int, Linear]] = []
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
    """Float8 as bytes, which torch can join everywhere."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


# ---------------------------------------------------------------- which kernel, by number of rows

Launch = Callable[[], object]
MakeLaunch = Callable[[int], Launch]
"""A launch for so many rows."""


def _launch_dense(product: Callable[[Tensor, Tensor], object], weight: Tensor, rows: int) -> Launch:
    n, k = weight.shape
    x, out = (torch.zeros(rows, size, dtype=weight.dtype, device="cuda") for size in (k, n))
    return partial(product, x, out)


def rows_of_own_kernel(key: tuple[Any, ...], weight: Tensor, own: MakeLaunch, theirs: MakeLaunch) -> int:
    """Rows of x up to which our kernel is the faster one; measured once for each key."""
    if not weight.is_cuda or weight.shape[1] % 64:
        return 0
    if key not in _crossovers:
        _crossovers[key] = _measure(own, theirs)
    return _crossovers[key]


def _measure(own: MakeLaunch, theirs: MakeLaunch) -> int:
    flush = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    best = 0
    for rows in (count for count in _TRIED if count <= ops.skinny_max_rows()):
        if _time(own(rows), flush) > _time(theirs(rows), flush):
            break
        best = rows
    return best


def _time(launch: Launch, flush: Tensor) -> float:
    """Milliseconds of one launch whose weight is in no cache, the least of several."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        launch()
        end.record()
    events[-1][1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in events)

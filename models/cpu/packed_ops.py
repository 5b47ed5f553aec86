"""Linear layers over packed weights (models/weights/packed) on tensors: `linear` and `gather_rows`. Called by models/layers.

Activations are float32 [M, K]; for block types they are rounded to int8 per 32 values inside `linear`, for INT8 per row. A
row's result is bit-identical whatever the other rows, their number and the number of threads (per instruction set).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.models.native import load_native
from trireme.models.weights import packed
from trireme.models.weights.packed import BLOCKS as BLOCKS
from trireme.models.weights.packed import PACKED_KINDS as PACKED_KINDS
from trireme.models.weights.packed import ROW_SCALE_BYTES as ROW_SCALE_BYTES
from trireme.models.weights.packed import SCHEMES as SCHEMES
from trireme.models.weights.packed import Bytes as Bytes
from trireme.models.weights.packed import PackedWeight as PackedWeight
from trireme.models.weights.packed import row_bytes as row_bytes

Raw: TypeAlias = Tensor | NDArray[Any]

_native: Any = load_native()
_linear = _native.linear
_empty = torch.empty
_FLOAT32 = torch.float32


def bytes_of(raw: Raw) -> Bytes:
    """The bytes of a raw matrix as a flat contiguous array; copies only what is not contiguous."""
    if isinstance(raw, Tensor):
        raw = raw.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return packed.bytes_of(raw)


def slice_rows(kind: str, raw: Raw, k: int, rows: slice) -> Bytes:
    """Rows of a raw matrix with rows of k values."""
    return bytes_of(raw).reshape(-1, row_bytes(kind, k))[rows]


def slice_cols(kind: str, raw: Raw, k: int, cols: slice) -> Bytes:
    """Columns of a raw matrix; both ends of `cols` must be on block borders (ModelError otherwise)."""
    start, stop, _ = cols.indices(k)
    matrix = bytes_of(raw).reshape(-1, row_bytes(kind, k))
    head = ROW_SCALE_BYTES.get(kind, 0)
    part = matrix[:, row_bytes(kind, start) : row_bytes(kind, stop)]
    return np.ascontiguousarray(np.concatenate((matrix[:, :head], part), axis=1) if head else part)


def pack(kind: str, raw: Raw, n: int, k: int) -> PackedWeight:
    """packed.pack of an array or a tensor."""
    return packed.pack(kind, bytes_of(raw), n, k)


def quantize(scheme: str, weight: Tensor) -> tuple[str, Bytes]:
    """quantize_rows of a dense tensor [n, k] of any float type."""
    return packed.quantize_rows(scheme, weight.detach().float().contiguous().numpy())


def linear(
    x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """x @ weight.T (+ bias) into `out` [M, n] float32; accumulate adds to what `out` holds. x [M, k] float32, rows may be
    strided. A value of x that is not finite spoils its own row only: all NaN with block types, NaN or inf with dense ones.
    Raises ValueError, with the operand's name, for tensors that do not fit."""
    if out is None:
        if accumulate:
            raise ValueError("accumulate needs out")
        out = _empty(x.shape[0], weight.n, dtype=_FLOAT32)
    _linear(weight._handle, x, out, bias, accumulate)
    return out


def gather_rows(weight: PackedWeight, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of the matrix as float32 [T, k]: embedding lookup from the very copy that the output head multiplies with.
    ids [T] int32 or int64; one out of range raises IndexError."""
    if ids.dtype is not torch.int32 or not ids.is_contiguous():
        ids = ids.to(torch.int32).contiguous()
    if out is None:
        out = torch.empty((ids.numel(), weight.k), dtype=torch.float32)
    _native.gather_rows(weight.native, ids, out)
    return out


def unpack(weight: PackedWeight) -> Tensor:
    """The whole matrix as float32 [n, k], exactly the values of the file."""
    return gather_rows(weight, torch.arange(weight.n, dtype=torch.int32))


def linear_reference(
    x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """What linear computes, in float64 torch and without the rounding of activations."""
    result = x.double() @ unpack(weight).double().T
    if bias is not None:
        result += bias.double()
    if out is None:
        return result.float()
    return out.copy_(result + out.double() if accumulate else result)

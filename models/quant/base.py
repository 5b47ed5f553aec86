"""Linear layers over packed weights: pack once at load, then `linear` per step. Called by models/layers and models/load.

A weight of one of the PACKED_KINDS keeps the bits of the file: rows are interleaved into tiles of 16 so that a SIMD lane is
an output row. Activations are float32 [M, K]; for block types they are rounded to int8 per 32 values inside `linear`.
A row's result is bit-identical whatever the other rows, their number and the number of threads (per instruction set).

`raw` below is the matrix as it lies in a file, row by row: uint8 [n, row_bytes] (or flat) of any GGUF type, or a dense
torch tensor [n, k]. Slices for tensor parallelism are cut from `raw`, before packing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.native import load_native
from trireme.errors import ModelError
from trireme.gguf import TENSOR_TYPES

Bytes = NDArray[np.uint8]
Raw = Tensor | Bytes

# Kinds that linear computes with as they are; the numbers are those of WeightKind in csrc/cpu/linear.h.
PACKED_KINDS = {
    **{"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5, "Q5_0": 6, "Q5_1": 7, "Q2_K": 8, "Q3_K": 9},
    **{"Q4_K": 10, "Q5_K": 11, "Q6_K": 12, "IQ4_NL": 13, "IQ4_XS": 14, "MXFP4": 15},
}
BLOCKS = {name: (size, nbytes) for name, size, nbytes in TENSOR_TYPES.values()}
SCHEMES = {"q8_0": ("Q8_0", False), "q4_0": ("Q4_0", False), "int8": ("Q8_0", True)}
_DENSE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_native: Any = load_native()
_linear = _native.linear
_empty = torch.empty
_FLOAT32 = torch.float32


class PackedWeight:
    """An [n, k] matrix in tiles, owned by native memory. Never changes after `pack`; any thread may read it."""

    __slots__ = ("_handle", "k", "kind", "n", "nbytes")

    def __init__(self, handle: Any, kind: str, n: int, k: int) -> None:
        self._handle = handle
        self.kind = kind
        self.n = n
        self.k = k
        self.nbytes: int = handle.nbytes

    @property
    def native(self) -> Any:
        """The native object, for code that hands it to other native code."""
        return self._handle

    def __repr__(self) -> str:
        return f"PackedWeight({self.kind}, n={self.n}, k={self.k})"


def kind_of(tensor: Tensor) -> str:
    """F32, F16 or BF16. Raises ModelError for another dtype."""
    if tensor.dtype not in _DENSE_KINDS:
        raise ModelError(f"weights of dtype {tensor.dtype} are not supported; supported: float32, float16, bfloat16")
    return _DENSE_KINDS[tensor.dtype]


def row_bytes(kind: str, k: int) -> int:
    """Bytes of one row of k values. Raises ModelError for an unknown kind or a k that is no multiple of its block."""
    if kind not in BLOCKS:
        raise ModelError(f"unknown weight type {kind}; known: {', '.join(BLOCKS)}")
    size, nbytes = BLOCKS[kind]
    if k % size:
        raise ModelError(f"rows of {k} values are not a multiple of the {size} values of a {kind} block")
    return k // size * nbytes


def bytes_of(raw: Raw) -> Bytes:
    """The bytes of a raw matrix as a flat contiguous array; copies only what is not contiguous."""
    if isinstance(raw, Tensor):
        raw = raw.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


def slice_rows(kind: str, raw: Raw, k: int, rows: slice) -> Bytes:
    """Rows of a raw matrix with rows of k values."""
    return bytes_of(raw).reshape(-1, row_bytes(kind, k))[rows]


def slice_cols(kind: str, raw: Raw, k: int, cols: slice) -> Bytes:
    """Columns of a raw matrix; both ends of `cols` must be on block borders (ModelError otherwise)."""
    start, stop, _ = cols.indices(k)
    matrix = bytes_of(raw).reshape(-1, row_bytes(kind, k))
    return np.ascontiguousarray(matrix[:, row_bytes(kind, start) : row_bytes(kind, stop)])


def pack(kind: str, raw: Raw, n: int, k: int) -> PackedWeight:
    """Packs a matrix of one of PACKED_KINDS. Raises ModelError for other kinds (see gguf_expand) and wrong sizes."""
    if kind not in PACKED_KINDS:
        raise ModelError(
            f"no kernel computes with {kind} as it is; expand it first. Kernels: {', '.join(PACKED_KINDS)}"
        )
    data = bytes_of(raw)
    if data.size != n * row_bytes(kind, k):
        raise ModelError(f"a {kind} matrix of {n} x {k} has {n * row_bytes(kind, k)} bytes, not {data.size}")
    handle = _native.pack_weight(PACKED_KINDS[kind], data.ctypes.data, n, k)
    return PackedWeight(handle, kind, n, k)


def quantize(scheme: str, weight: Tensor) -> tuple[str, Bytes]:
    """A dense [n, k] matrix, k a multiple of 32, rounded to raw blocks: (kind, uint8 [n, row_bytes]). Schemes are q8_0 and
    q4_0, equal to ggml's reference to the bit, and int8: one fp16 scale for each row, repeated in q8_0 blocks."""
    kind, one_scale = SCHEMES[scheme]
    n, k = weight.shape
    values = weight.detach().float().contiguous()
    raw = np.empty((n, row_bytes(kind, k)), np.uint8)
    _native.quantize_weight(PACKED_KINDS[kind], values.data_ptr(), n, k, one_scale, raw.ctypes.data)
    return kind, raw


def linear(
    x: Tensor, weight: PackedWeight, *, bias: Tensor | None = None, out: Tensor | None = None, accumulate: bool = False
) -> Tensor:
    """x @ weight.T (+ bias) into `out` [M, n] float32; accumulate adds to what `out` holds. x [M, k] float32, rows may be
    strided. A value of x that is not finite spoils its own row only: all NaN with block types, NaN or inf with dense ones."""
    # Lean on purpose: this runs for every matrix of every step. is_contiguous is the cheapest question about strides.
    m, k = x.shape
    n = weight.n
    if k != weight.k or x.dtype is not _FLOAT32:
        raise ValueError(f"linear wants float32 x [M, {weight.k}], got {x.dtype} {list(x.shape)}")
    x_stride = k if x.is_contiguous() else _row_stride(x)
    if out is None:
        if accumulate:
            raise ValueError("accumulate needs out")
        out = _empty(m, n, dtype=_FLOAT32)
        out_stride = n
    else:
        if out.shape != (m, n) or out.dtype is not _FLOAT32:
            raise ValueError(f"out must be float32 [{m}, {n}], got {out.dtype} {list(out.shape)}")
        out_stride = n if out.is_contiguous() else _row_stride(out)
    bias_address = 0
    if bias is not None:
        if bias.shape != (n,) or bias.dtype is not _FLOAT32 or not bias.is_contiguous():
            raise ValueError(f"bias must be contiguous float32 [{n}], got {bias.dtype} {list(bias.shape)}")
        bias_address = bias.data_ptr()
    _linear(weight._handle, x.data_ptr(), x_stride, m, out.data_ptr(), out_stride, bias_address, accumulate)
    return out


def _row_stride(x: Tensor) -> int:
    row, column = x.stride()
    if column != 1 and x.shape[1] != 1:
        raise ValueError(f"values of a row must be adjacent, got strides {row}, {column}")
    return row


def gather_rows(weight: PackedWeight, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of the matrix as float32 [T, k]: embedding lookup from the very copy that the output head multiplies with.
    ids [T] int32 or int64; one out of range raises IndexError."""
    ids = ids.to(torch.int32).contiguous()
    if out is None:
        out = torch.empty((ids.numel(), weight.k), dtype=torch.float32)
    _native.gather_rows(weight._handle, ids.data_ptr(), ids.numel(), out.data_ptr(), out.stride(0))
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

"""Packed weights: matrices that a kernel multiplies with as they are, made once at load from the bytes of a file. No torch.

Called by models/weights/sources, models/layers and models/arch; models/cpu/packed_ops computes with them on tensors. A weight
of one of the PACKED_KINDS keeps the bits of the file: rows are interleaved into tiles of 16 so that a SIMD lane is an output row.

`raw` below is the matrix as it lies in a file, row by row: uint8 [n, row_bytes] (or flat) of any GGUF type or INT8, or a
dense array [n, k]. Rows for tensor parallelism are cut from `raw`, before packing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ModelError
from trireme.model.gguf_header import TENSOR_TYPES
from trireme.model.packed_ints import BLOCK_SIZES
from trireme.model.quantized import FP8_BLOCK
from trireme.models.native import load_native

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

# Kinds that linear computes with as they are; the numbers are those of WeightKind in csrc/cpu/linear/linear.h.
PACKED_KINDS = {
    **{"F32": 0, "F16": 1, "BF16": 2, "Q8_0": 3, "Q4_0": 4, "Q4_1": 5, "Q5_0": 6, "Q5_1": 7, "Q2_K": 8, "Q3_K": 9},
    **{"Q4_K": 10, "Q5_K": 11, "Q6_K": 12, "IQ4_NL": 13, "IQ4_XS": 14, "MXFP4": 15, "INT8": 16},
}
# Values and bytes of a block. INT8 and FP8 are no types of GGUF: a row is its float32 scale, then k signed bytes or e4m3 values.
# A block of FP8_BLOCKS is such a row of its own; those of GROUPED are models/weights/grouped's.
GROUPED = {f"W4_{size}": size for size in BLOCK_SIZES}
BLOCKS = {
    **{name: (size, nbytes) for name, size, nbytes in TENSOR_TYPES.values()},
    **{"INT8": (1, 1), "FP8": (1, 1), "FP8_BLOCKS": (FP8_BLOCK, 4 + FP8_BLOCK)},
    **{kind: (size, 4 + size // 2) for kind, size in GROUPED.items()},
}
ROW_SCALE_BYTES = {"INT8": 4, "FP8": 4}
MAX_INT8_LENGTH = 1 << 17  # k's whose products surely sum within int32
SCHEMES = {"q8_0": "Q8_0", "q4_0": "Q4_0", "int8": "INT8"}

_native: Any = load_native()


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


def address_of(array: NDArray[Any]) -> int:
    """Where an array's first value lies; the array must outlive its use."""
    where: int = array.__array_interface__["data"][0]
    return where


def row_bytes(kind: str, k: int) -> int:
    """Bytes of one row of k values. Raises ModelError for an unknown kind, a k that is no multiple of its block, or one that
    is too large for INT8."""
    if kind not in BLOCKS:
        raise ModelError(f"unknown weight type {kind}; known: {', '.join(BLOCKS)}")
    size, nbytes = BLOCKS[kind]
    if k % size:
        raise ModelError(f"rows of {k} values are not a multiple of the {size} values of a {kind} block")
    if kind == "INT8" and k > MAX_INT8_LENGTH:
        raise ModelError(f"rows of {k} values are too long for int8, whose sums hold {MAX_INT8_LENGTH} products")
    return ROW_SCALE_BYTES.get(kind, 0) + k // size * nbytes


def bytes_of(raw: NDArray[Any]) -> Bytes:
    """The bytes of a raw matrix as a flat contiguous array; copies only what is not contiguous."""
    return np.ascontiguousarray(raw).reshape(-1).view(np.uint8)


def pack(kind: str, raw: NDArray[Any], n: int, k: int) -> PackedWeight:
    """Packs a matrix of one of PACKED_KINDS. Raises ModelError for other kinds (see gguf_expand) and as row_bytes does, ValueError
    for a `raw` of another size."""
    if kind not in PACKED_KINDS:
        raise ModelError(
            f"no kernel computes with {kind} as it is; expand it first. Kernels: {', '.join(PACKED_KINDS)}"
        )
    row_bytes(kind, k)  # raises
    return PackedWeight(_native.pack_weight(PACKED_KINDS[kind], bytes_of(raw), n, k), kind, n, k)


def quantize_rows(scheme: str, values: Floats) -> tuple[str, Bytes]:
    """A dense [n, k] matrix rounded to raw rows: (kind, uint8 [n, row_bytes]). Schemes are q8_0 and q4_0, k a multiple of 32,
    equal to ggml's reference to the bit, and int8: signed bytes, the largest of a row 127, with one float32 scale for each row."""
    kind = SCHEMES[scheme]
    n, k = values.shape
    raw = np.empty((n, row_bytes(kind, k)), np.uint8)
    _native.quantize_weight(PACKED_KINDS[kind], np.ascontiguousarray(values), raw)
    return kind, raw


def int8_rows(codes: NDArray[np.int8], scales: Floats) -> Bytes:
    """Raw rows of INT8 from signed bytes [n, k] and the scale of each row [n]."""
    return scaled_rows("INT8", codes.view(np.uint8), scales)


def scaled_rows(kind: str, codes: Bytes, scales: Floats) -> Bytes:
    """Raw rows of INT8 or FP8 from their bytes [n, k] and the scale of each row [n]."""
    n, k = codes.shape
    raw = np.empty((n, row_bytes(kind, k)), np.uint8)
    raw[:, :4] = np.ascontiguousarray(scales, np.float32).reshape(n, 1).view(np.uint8)
    raw[:, 4:] = codes
    return raw


def fp8_block_rows(codes: Bytes, scales: Floats) -> Bytes:
    """Raw rows of FP8_BLOCKS from e4m3 values [n, k] and the scale of each block of a row [n, k / 128]."""
    n, blocks = scales.shape
    raw = np.empty((n, blocks, 4 + FP8_BLOCK), np.uint8)
    raw[:, :, :4] = np.ascontiguousarray(scales, np.float32).view(np.uint8).reshape(n, blocks, 4)
    raw[:, :, 4:] = codes.reshape(n, blocks, FP8_BLOCK)
    return raw.reshape(n, -1)


def expand_scaled(kind: str, raw: Bytes) -> Floats:
    """float32 [n, k] of raw rows of INT8 or FP8."""
    scales = np.ascontiguousarray(raw[:, :4]).view(np.float32)
    codes = raw[:, 4:]
    values = codes.view(np.int8).astype(np.float32) if kind == "INT8" else E4M3_VALUES[codes]
    return scales * values


def _e4m3_values() -> Floats:
    """The value of each byte as float8 e4m3fn: no infinities, NaN where all bits but the sign are set."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


E4M3_VALUES = _e4m3_values()

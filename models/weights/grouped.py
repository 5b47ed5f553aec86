"""Decodes the packed integers of GPTQ, AWQ and compressed-tensors, and repacks them into 4-bit quant blocks, in numpy.

Called by models/weights/grouped_source, models/weights/sources and models/weights/tp_shards; pure. A weight is scale * (code -
zero). A quant block of kind W4_B holds B adjacent inputs of an output in 4 + B / 2 bytes: float16 scale, zero, one unused
byte, then the codes, low nibble first. Repacking is exact: a matrix that a quant block cannot represent is kept as float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ModelError
from trireme.model.packed_ints import BLOCK_SIZES
from trireme.models.weights.packed import GROUPED, Bytes, Floats

HEAD = 4  # bytes of a quant block before its codes
_AT_ONCE = 1 << 22  # codes per chunk
_AT_ONCE_ACROSS = 128  # columns per transposed chunk


class Grouped(NamedTuple):
    """A matrix [n, k]: `packed` codes [n, k * bits / 8], scales and zeros [n, groups], and the group [k] of each input."""

    bits: int
    packed: Bytes
    scales: Floats
    zeros: Bytes
    group_of: NDArray[np.intp]

    def codes(self) -> Bytes:
        """[n, k]"""
        return codes_of(self.packed, self.bits)

    def values(self) -> Floats:
        """Dequantized [n, k]; exact, since the product fits in float32."""
        out = np.empty((self.packed.shape[0], self.group_of.size), np.float32)
        step = max(1, _AT_ONCE // self.group_of.size)
        for start in range(0, out.shape[0], step):
            rows = slice(start, start + step)
            steps = codes_of(self.packed[rows], self.bits).astype(np.float32) - self.zeros[rows][:, self.group_of]
            np.multiply(steps, self.scales[rows][:, self.group_of], out=out[rows])
        return out


def codes_of(packed: NDArray[Any], bits: int) -> Bytes:
    """Unpacks codes from bytes or words, lowest bits first: [..., m] -> [..., m * element bits / bits]."""
    as_bytes = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return as_bytes
    return np.stack((as_bytes & 15, as_bytes >> 4), axis=-1).reshape(*as_bytes.shape[:-1], -1)


def groups_in_turn(k: int, group_size: int) -> NDArray[np.intp]:
    """Quant group [k] of each input for consecutive groups; group_size -1: a single group."""
    return np.arange(k) // (k if group_size < 0 else group_size)


def from_gptq(
    bits: int,
    qweight: NDArray[np.int32],
    qzeros: NDArray[np.int32],
    scales: Floats,
    group_of: NDArray[np.intp],
    zero_offset: int,
) -> Grouped:
    """From qweight [k * bits / 32, n] (adjacent inputs packed in a word), qzeros [groups, n * bits / 32] (adjacent outputs)
    and scales [groups, n]."""
    zeros = codes_of(qzeros, bits) + np.uint8(zero_offset) & np.uint8((1 << bits) - 1)
    packed = _turned(qweight).view(np.uint8)
    return Grouped(bits, packed, np.ascontiguousarray(scales.T), np.ascontiguousarray(zeros.T), group_of)


def from_awq(
    qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: Floats, group_of: NDArray[np.intp]
) -> Grouped:
    """From qweight [k, n / 8] and qzeros [groups, n / 8] (8 outputs packed in a word, even ones first) and scales [groups, n]."""
    n, k = qweight.shape[1] * 8, len(qweight)
    packed = np.empty((n, k // 2), np.uint8)
    for start in range(0, n, _AT_ONCE_ACROSS):
        codes = _in_order(qweight[:, start // 8 : (start + _AT_ONCE_ACROSS) // 8])
        packed[start : start + _AT_ONCE_ACROSS] = (codes[0::2] | codes[1::2] << 4).T
    return Grouped(4, packed, np.ascontiguousarray(scales.T), np.ascontiguousarray(_in_order(qzeros).T), group_of)


def _in_order(words: NDArray[np.int32]) -> Bytes:
    """Unpacks words that hold outputs in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    pairs = (
        np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1, 2, 2)
    )  # [rows, words, even or odd, bytes]
    out = np.empty((*pairs.shape[:2], 8), np.uint8)
    for odd in range(2):
        out[:, :, odd::4] = pairs[:, :, odd] & 15
        out[:, :, odd + 2 :: 4] = pairs[:, :, odd] >> 4
    return out.reshape(len(words), -1)


def _turned(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """The transposed matrix, copied in column chunks for cache locality."""
    out = np.empty(words.shape[::-1], np.int32)
    for start in range(0, len(out), _AT_ONCE_ACROSS):
        out[start : start + _AT_ONCE_ACROSS] = words[:, start : start + _AT_ONCE_ACROSS].T
    return out


def from_compressed(
    bits: int,
    packed: NDArray[np.int32],
    scales: Floats,
    zeros: NDArray[np.int32] | None,
    group_of: NDArray[np.intp],
) -> Grouped:
    """From packed [n, k * bits / 32] and zeros [n * bits / 32, groups], both signed integers offset by half their range, and
    scales [n, groups]. zeros None: all 0."""
    if zeros is None:
        found = np.full(scales.shape, 1 << (bits - 1), np.uint8)
    else:
        found = np.ascontiguousarray(codes_of(np.ascontiguousarray(zeros.T), bits).T)
    return Grouped(bits, np.ascontiguousarray(packed).view(np.uint8), scales, found, group_of)


# ---------------------------------------------------------------- blocks


def rows_of(matrix: Grouped) -> tuple[str, Bytes]:
    """(kind, raw rows) of a matrix: W4_B for 4 bits, Q8_0 for 8; F32 if groups, scales or zeros fit neither."""
    size = _block_size(matrix.group_of)
    with np.errstate(over="ignore"):
        scales = matrix.scales.astype(np.float16)
    if size and np.array_equal(scales.astype(np.float32), matrix.scales):
        if matrix.bits == 4:
            groups = matrix.group_of[::size]
            return f"W4_{size}", _w4_rows(matrix.packed, scales[:, groups], matrix.zeros[:, groups], size)
        if (matrix.zeros == 128).all():
            return "Q8_0", _q8_rows(matrix.packed, scales[:, matrix.group_of[::32]])
    return "F32", matrix.values().view(np.uint8)


def _block_size(group_of: NDArray[np.intp]) -> int:
    """The largest quant block size that divides every quant group; 0 if there is none."""
    k = group_of.size
    for size in BLOCK_SIZES:
        if k % size == 0 and (group_of.reshape(-1, size) == group_of[::size, None]).all():
            return size
    return 0


def _w4_rows(packed: Bytes, scales: NDArray[np.float16], zeros: Bytes, size: int) -> Bytes:
    n, blocks = scales.shape
    raw = np.zeros((n, blocks, HEAD + size // 2), np.uint8)
    raw[:, :, :2] = np.ascontiguousarray(scales).view(np.uint8).reshape(n, blocks, 2)
    raw[:, :, 2] = zeros
    raw[:, :, HEAD:] = packed.reshape(n, blocks, size // 2)
    return raw.reshape(n, -1)


def _q8_rows(packed: Bytes, scales: NDArray[np.float16]) -> Bytes:
    n, blocks = scales.shape
    raw = np.empty((n, blocks, 34), np.uint8)
    raw[:, :, :2] = np.ascontiguousarray(scales).view(np.uint8).reshape(n, blocks, 2)
    raw[:, :, 2:] = packed.reshape(n, blocks, 32) ^ 128
    return raw.reshape(n, -1)


def narrower(kind: str, raw: Bytes, size: int) -> tuple[str, Bytes]:
    """Splits W4 quant blocks into smaller ones of `size` values. Raises ModelError for a size that does not divide them."""
    had = GROUPED[kind]
    if size not in BLOCK_SIZES or had % size:
        raise ModelError(f"blocks of {had} values cannot be made blocks of {size}; possible: {BLOCK_SIZES}")
    blocks = raw.reshape(len(raw), -1, HEAD + had // 2)
    heads = blocks[:, :, :HEAD].repeat(had // size, 1)
    codes = blocks[:, :, HEAD:].reshape(len(raw), -1, size // 2)
    return f"W4_{size}", np.concatenate((heads, codes), axis=2).reshape(len(raw), -1)


def cpu_rows(kind: str, raw: Bytes) -> tuple[str, Bytes]:
    """Converts W4 quant blocks exactly to a kind with CPU kernels: (kind, rows), Q4_0 if every zero is 8, else Q5_0, whose
    5 bits hold code - zero."""
    size = GROUPED[kind]
    n = len(raw)
    blocks = raw.reshape(n, -1, HEAD + size // 2)
    is_even = bool((blocks[:, :, 2] == 8).all())
    nbytes = 18 if is_even else 22
    out = np.empty((n, blocks.shape[1] * (size // 32), nbytes), np.uint8)
    step = max(1, _AT_ONCE // (blocks.shape[1] * size))
    for start in range(0, n, step):
        _fill(out[start : start + step], blocks[start : start + step], size, is_even=is_even)
    return "Q4_0" if is_even else "Q5_0", out.reshape(n, -1)


def _fill(out: Bytes, blocks: Bytes, size: int, *, is_even: bool) -> None:
    out[:, :, :2] = blocks[:, :, :2].repeat(size // 32, 1)
    codes = codes_of(blocks[:, :, HEAD:], 4)
    if not is_even:
        codes = codes + (16 - blocks[:, :, 2:3])
    runs = codes.reshape(*out.shape[:2], 32)
    out[:, :, -16:] = runs[:, :, :16] & 15 | runs[:, :, 16:] << 4
    if not is_even:
        out[:, :, 2:6] = np.packbits(runs >> 4, axis=2, bitorder="little")

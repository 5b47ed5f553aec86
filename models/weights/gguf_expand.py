"""Dequantizes GGUF tensor types to float32, vectorised over quant blocks. Called at load for types without a kernel.

One function per type, from quant blocks uint8 [B, block bytes] to values [B, block size]. Layouts are those of ggml's block
structs (https://github.com/ggml-org/ggml, ggml-common.h). EXPANDABLE lists the types; IQ1, IQ2 and IQ3 need the code books
of the gguf package.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trireme.errors import ModelError
from trireme.models.weights.packed import (
    BLOCKS,
    E4M3_VALUES,
    GROUPED,
    ROW_SCALE_BYTES,
    Bytes,
    Floats,
    bytes_of,
    expand_scaled,
    row_bytes,
)

# Quant blocks expanded at a time: bounds the temporaries to some tens of MiB.
CHUNK_BLOCKS = 1 << 15

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# Doubled values of a 4-bit float with 2 exponent bits and 1 fraction bit; the scale below is halved.
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def halfs(blocks: Bytes, at: int) -> Floats:
    """The fp16 at byte `at` of each quant block, as [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def nibbles(packed: Bytes) -> Bytes:
    """Low nibbles then high nibbles along the last dim: [..., n] -> [..., 2 n]."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def bits_of_words(packed: Bytes) -> Bytes:
    """The 32 bits of 4 little-endian bytes of each quant block, lowest first: [B, 4] -> [B, 32]."""
    return np.unpackbits(packed, axis=-1, bitorder="little")


def crumbs(packed: Bytes) -> Bytes:
    """2-bit values of the K types: [B, 64] -> [B, 2, 4, 32], bit pair j of 32 bytes holding the j-th run of 32 values."""
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return np.bitwise_and(packed.reshape(-1, 2, 1, 32) >> shifts, np.uint8(3))


def scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and eight 6-bit mins of Q4_K and Q5_K from 12 bytes."""
    a, b, c = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    mins = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return scales.astype(np.float32), mins.astype(np.float32)


def expand_q4_0(b: Bytes) -> Floats:
    return halfs(b, 0) * (nibbles(b[:, 2:]).astype(np.float32) - 8)


def expand_q4_1(b: Bytes) -> Floats:
    return halfs(b, 0) * nibbles(b[:, 4:]).astype(np.float32) + halfs(b, 2)


def expand_q5_0(b: Bytes) -> Floats:
    return halfs(b, 0) * ((nibbles(b[:, 6:]) | bits_of_words(b[:, 2:6]) << 4).astype(np.float32) - 16)


def expand_q5_1(b: Bytes) -> Floats:
    return halfs(b, 0) * (nibbles(b[:, 8:]) | bits_of_words(b[:, 4:8]) << 4).astype(np.float32) + halfs(b, 2)


def expand_q8_0(b: Bytes) -> Floats:
    return halfs(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def expand_q2_k(b: Bytes) -> Floats:
    scale = halfs(b, 80) * (b[:, :16] & 15).astype(np.float32)
    minimum = halfs(b, 82) * (b[:, :16] >> 4).astype(np.float32)
    values = crumbs(b[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    return scale[:, :, None] * values - minimum[:, :, None]


def expand_q3_k(b: Bytes) -> Floats:
    """Q3_K, [B, 110] -> [B, 16, 16]: 6-bit scales (offset 32) of 16 values, 2 low bits per value, a mask of third bits."""
    low = nibbles(b[:, 96:104])
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = ((b[:, None, 104:108] >> shifts) & 3).reshape(-1, 16)
    scale = halfs(b, 108) * ((low | high << 4).astype(np.float32) - 32)
    bit = (b[:, None, :32] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1  # run of 32 values -> its bit
    values = (crumbs(b[:, 32:96]).reshape(-1, 8, 32) | bit << 2).astype(np.float32) - 4
    return scale[:, :, None] * values.reshape(-1, 16, 16)


def expand_q4_k(b: Bytes) -> Floats:
    scales, mins = scales_and_mins(b[:, 4:16])
    values = nibbles(b[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    return (halfs(b, 0) * scales)[:, :, None] * values - (halfs(b, 2) * mins)[:, :, None]


def expand_q5_k(b: Bytes) -> Floats:
    scales, mins = scales_and_mins(b[:, 4:16])
    bit = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    values = nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | bit << 4
    return (halfs(b, 0) * scales)[:, :, None] * values.astype(np.float32) - (halfs(b, 2) * mins)[:, :, None]


def expand_q6_k(b: Bytes) -> Floats:
    low = nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    values = (low | crumbs(b[:, 128:192]) << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scale = halfs(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return scale[:, :, None] * values


def expand_q8_k(b: Bytes) -> Floats:
    return np.ascontiguousarray(b[:, :4]).view(np.float32) * b[:, 4:260].view(np.int8).astype(np.float32)


def expand_iq4_nl(b: Bytes) -> Floats:
    return halfs(b, 0) * IQ4_VALUES[nibbles(b[:, 2:])]


def expand_iq4_xs(b: Bytes) -> Floats:
    run = np.arange(8)
    high = (np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> (2 * run).astype(np.uint16)) & 3
    low = (b[:, 4 + run // 2] >> (4 * (run % 2)).astype(np.uint8)) & 15
    scale = halfs(b, 0) * ((low | high << 4).astype(np.float32) - 32)
    return scale[:, :, None] * IQ4_VALUES[nibbles(b[:, 8:].reshape(-1, 8, 16))]


def expand_mxfp4(b: Bytes) -> Floats:
    exponent = b[:, :1].astype(np.uint32)  # the scale is 2^(exponent - 128), subnormal for 0 and 1
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - np.uint32(1)) << np.uint32(23))
    return bits.view(np.float32) * MXFP4_VALUES[nibbles(b[:, 1:])]


def expand_tq1_0(b: Bytes) -> Floats:
    """Five base-3 digits to a byte, highest first, read by multiplying with powers of 3 modulo 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8).reshape(1, 5, 1)
    parts = [b[:, None, :32] * powers, b[:, None, 32:48] * powers, b[:, None, 48:52] * powers[:, :4]]
    digits = [(part.astype(np.uint16) * 3 >> 8).reshape(len(b), -1) for part in parts]
    return halfs(b, 52) * (np.concatenate(digits, axis=1).astype(np.float32) - 1)


def expand_tq2_0(b: Bytes) -> Floats:
    return halfs(b, 64) * (crumbs(b[:, :64]).reshape(len(b), -1).astype(np.float32) - 1)


def expand_w4(b: Bytes) -> Floats:
    """W4 quant blocks of models/weights/grouped."""
    codes = np.stack((b[:, 4:] & 15, b[:, 4:] >> 4), axis=-1).reshape(len(b), -1)
    return halfs(b, 0) * (codes.astype(np.float32) - b[:, 2:3])


def expand_fp8_blocks(b: Bytes) -> Floats:
    return np.ascontiguousarray(b[:, :4]).view(np.float32) * E4M3_VALUES[b[:, 4:]]


def with_code_book(kind: str) -> Callable[[Bytes], Floats]:
    """Expansion of a type by the gguf package, imported on first use. Raises ModelError if it is not installed."""

    def expand(b: Bytes) -> Floats:
        try:
            from gguf import GGMLQuantizationType, quants
        except ImportError as error:
            raise ModelError(
                f"weights of type {kind} need the gguf package: {error}", hint="pip install gguf"
            ) from error
        with np.errstate(invalid="ignore", over="ignore"):  # scales of a broken file
            return np.asarray(quants.dequantize(b, GGMLQuantizationType[kind]), np.float32)

    return expand


def expand_f32(b: Bytes) -> Floats:
    return b.view(np.float32)


def expand_f16(b: Bytes) -> Floats:
    return b.view(np.float16).astype(np.float32)


def expand_bf16(b: Bytes) -> Floats:
    return (b.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def expand_f64(b: Bytes) -> Floats:
    return b.view(np.float64).astype(np.float32)


EXPANDABLE: dict[str, Callable[[Bytes], Floats]] = {
    "F32": expand_f32,
    "F16": expand_f16,
    "BF16": expand_bf16,
    "F64": expand_f64,
    "Q4_0": expand_q4_0,
    "Q4_1": expand_q4_1,
    "Q5_0": expand_q5_0,
    "Q5_1": expand_q5_1,
    "Q8_0": expand_q8_0,
    "Q2_K": expand_q2_k,
    "Q3_K": expand_q3_k,
    "Q4_K": expand_q4_k,
    "Q5_K": expand_q5_k,
    "Q6_K": expand_q6_k,
    "Q8_K": expand_q8_k,
    "IQ4_NL": expand_iq4_nl,
    "IQ4_XS": expand_iq4_xs,
    "MXFP4": expand_mxfp4,
    "TQ1_0": expand_tq1_0,
    "TQ2_0": expand_tq2_0,
    **{kind: with_code_book(kind) for kind in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
}


OF_CHECKPOINTS: dict[str, Callable[[Bytes], Floats]] = {
    **dict.fromkeys(GROUPED, expand_w4),
    "FP8_BLOCKS": expand_fp8_blocks,
}


def dequantize(kind: str, raw: Bytes, n: int, k: int) -> Floats:
    """float32 [n, k], the exact values of the file. Raises ModelError for a type that is not in EXPANDABLE."""
    if kind in ROW_SCALE_BYTES:
        return expand_scaled(kind, bytes_of(raw).reshape(n, row_bytes(kind, k)))
    expand = OF_CHECKPOINTS.get(kind) or EXPANDABLE.get(kind)
    if expand is None:
        raise ModelError(
            f"weights of type {kind} cannot be read; readable types: {', '.join(EXPANDABLE)}",
            hint="requantize the model to one of these, Q4_1 or Q8_0 being the fastest here",
        )
    data = bytes_of(raw)
    if data.size != n * row_bytes(kind, k):
        raise ModelError(f"a {kind} matrix of {n} x {k} has {n * row_bytes(kind, k)} bytes, not {data.size}")
    size, nbytes = BLOCKS[kind]
    per_chunk = CHUNK_BLOCKS * max(1, 32 // size)
    blocks = data.reshape(-1, nbytes)
    out = np.empty((len(blocks), size), np.float32)
    for start in range(0, len(blocks), per_chunk):
        chunk = np.ascontiguousarray(blocks[start : start + per_chunk])
        out[start : start + per_chunk] = expand(chunk).reshape(-1, size)
    return out.reshape(n, k)

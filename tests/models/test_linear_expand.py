"""Expansion of GGUF types against the gguf package as oracle, on random bytes: every bit pattern must be read alike."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from models.quant.base import BLOCKS, bytes_of, slice_cols, slice_rows
from models.quant.gguf_expand import CHUNK_BLOCKS, EXPANDABLE, dequantize
from trireme.errors import ModelError

# Byte offsets of the fp16 scales of a block; random bytes there are replaced, for fp16 NaN and infinity teach nothing.
FP16_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,),
    "TQ2_0": (64,), "F16": (0,),
}  # fmt: skip
ORACLE_LACKS = {"Q8_K", "F64", "BF16", "F32"}


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    for at in FP16_AT.get(kind, ()):
        blocks[:, at : at + 2] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":  # the exponent byte; above 250 the values leave float32
        blocks[:, 0] %= 251
        blocks[:3, 0] = [0, 1, 2]
    return blocks


@pytest.mark.parametrize("kind", sorted(set(EXPANDABLE) - ORACLE_LACKS))
def test_expansion_equals_the_oracle(kind: str) -> None:
    size, _ = BLOCKS[kind]
    blocks = random_blocks(kind, 6 * 50)
    ours = dequantize(kind, blocks, 50, 6 * size)
    oracle = quants.dequantize(blocks.reshape(50, -1), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(ours, oracle)


def test_expansion_of_types_the_oracle_lacks() -> None:
    values = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    np.testing.assert_array_equal(dequantize("F32", values.view(np.uint8), 4, 256), values)
    np.testing.assert_array_equal(dequantize("F64", values.astype(np.float64).view(np.uint8), 4, 256), values)
    bf16 = (values.view(np.uint32) >> 16).astype(np.uint16)
    truncated = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(dequantize("BF16", bf16.view(np.uint8), 4, 256), truncated)

    q = np.arange(-128, 128, dtype=np.int8)
    q8_k = np.concatenate([np.array([0.25], np.float32).view(np.uint8), q.view(np.uint8), np.zeros(32, np.uint8)])
    np.testing.assert_array_equal(dequantize("Q8_K", q8_k, 1, 256)[0], q * np.float32(0.25))


def test_expansion_in_chunks_is_seamless() -> None:
    count = CHUNK_BLOCKS + 7
    blocks = random_blocks("Q4_0", count)
    whole = dequantize("Q4_0", blocks, count, 32)
    tail = dequantize("Q4_0", blocks[-14:], 14, 32)
    np.testing.assert_array_equal(whole[-14:], tail)


def test_unreadable_type_names_the_readable_ones() -> None:
    with pytest.raises(ModelError, match="IQ2_XXS cannot be read; readable types: .*Q4_K"):
        dequantize("IQ2_XXS", np.zeros(66, np.uint8), 1, 256)


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ModelError, match="has 68 bytes, not 34"):
        dequantize("Q8_0", np.zeros(34, np.uint8), 2, 32)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "F16", "Q4_K"])
def test_slices_of_raw_rows_and_columns(kind: str) -> None:
    size, _ = BLOCKS[kind]
    k = 4 * max(size, 32)
    raw = random_blocks(kind, 6 * k // size)
    whole = dequantize(kind, raw, 6, k)
    rows = slice_rows(kind, raw, k, slice(2, 5))
    np.testing.assert_array_equal(dequantize(kind, rows, 3, k), whole[2:5])
    cols = slice_cols(kind, raw, k, slice(k // 4, k // 4 * 3))
    np.testing.assert_array_equal(dequantize(kind, cols, 6, k // 2), whole[:, k // 4 : k // 4 * 3])
    assert bytes_of(raw).size == raw.size


def test_slice_inside_a_block_is_refused() -> None:
    with pytest.raises(ModelError, match="not a multiple of the 32 values of a Q4_1 block"):
        slice_cols("Q4_1", random_blocks("Q4_1", 4), 128, slice(0, 48))

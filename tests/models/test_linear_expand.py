"""Expansion of GGUF types against the gguf package as oracle, on random bytes: every bit pattern must be read alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from trireme.errors import ModelError
from trireme.machine.weight_bytes import stored_bytes
from trireme.model.files import ModelFiles
from trireme.model.gguf_header import LOADED_AS, read_gguf
from trireme.models.cpu.packed_ops import BLOCKS, bytes_of, slice_cols, slice_rows
from trireme.models.weights.gguf_expand import CHUNK_BLOCKS, EXPANDABLE, dequantize
from trireme.models.weights.sources import GgufSource

# Byte offsets of the fp16 scales of a block; random bytes there are replaced, for fp16 NaN and infinity teach nothing.
FP16_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q8_1": (0, 2), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,),
    "TQ2_0": (64,), "F16": (0,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
ORACLE_LACKS = {"Q8_K", "F64", "BF16", "F32"}


def random_blocks(kind: str, count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCKS[kind][1]), dtype=np.uint8)
    for at in FP16_AT.get(kind, ()):
        blocks[:, at : at + 2] = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":  # the fp16 scale lies in the highest 4 bits of its four 16-bit words of scales
        words = blocks[:, 48:].view(np.uint16)
        bits = rng.standard_normal((count, 1)).astype(np.float16).view(np.uint16)
        shifts = np.array([0, 4, 8, 12], np.uint16)
        words[:] = (words & 0x0FFF) | ((bits >> shifts & np.uint16(15)) << np.uint16(12))
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
    with pytest.raises(ModelError, match="I8 cannot be read; readable types: .*Q4_K"):
        dequantize("I8", np.zeros(256, np.uint8), 1, 256)


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


EXPANDED = sorted(LOADED_AS)


def gguf_of_blocks(path: Path, n: int, k: int) -> dict[str, np.ndarray]:
    """A file with one matrix of random blocks of each type that no kernel reads; returns the raw blocks."""
    writer, blocks = GGUFWriter(path, "llama"), {}
    for kind in EXPANDED:
        size, nbytes = BLOCKS[kind]
        if kind == "F64":
            raw = np.random.default_rng(3).standard_normal((n, k)).view(np.uint8)
        else:
            raw = random_blocks(kind, n * k // size, seed=3).reshape(n, k // size * nbytes)
        if kind == "Q8_K":
            raw.reshape(-1, nbytes)[:, :4] = np.full(1, 0.01, np.float32).view(np.uint8)
        blocks[kind] = raw
        writer.add_tensor(f"{kind}.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def test_types_without_a_kernel_are_expanded_at_load(tmp_path: Path) -> None:
    """In 8-bit blocks the values of the file within half a step; at the size that the plan counts."""
    n, k = 5, 512
    blocks = gguf_of_blocks(tmp_path / "m.gguf", n, k)
    source = GgufSource(tmp_path / "m.gguf")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    for kind in EXPANDED:
        matrix = source.matrix(f"{kind}.weight", n, k).computable(None)
        assert matrix.kind == LOADED_AS[kind]
        assert matrix.raw.nbytes == tensors[f"{kind}.weight"].loaded_bytes
        values = matrix.as_float32()
        if kind in ORACLE_LACKS:
            exact = dequantize(kind, blocks[kind], n, k)
        else:
            exact = quants.dequantize(blocks[kind], GGMLQuantizationType[kind])
        peaks = np.abs(exact).reshape(n, -1, 32).max(-1, keepdims=True)
        step = peaks / 127 * 0.51 + np.abs(exact).reshape(n, -1, 32) * 2.0**-10
        assert (np.abs(values - exact).reshape(n, -1, 32) <= step).all()
        assert np.abs(values).max() > 0


def test_expansion_is_told_and_counted(tmp_path: Path) -> None:
    blocks = gguf_of_blocks(tmp_path / "m.gguf", 4, 256)
    size, decision = stored_bytes(ModelFiles("gguf", tmp_path / "m.gguf", "m"))
    assert decision is not None
    assert "1 IQ2_XXS as Q8_0" in decision.value
    assert "in the file" in decision.because
    grown = sum(4 * 256 // BLOCKS[LOADED_AS[k]][0] * BLOCKS[LOADED_AS[k]][1] - raw.nbytes for k, raw in blocks.items())
    assert size == (tmp_path / "m.gguf").stat().st_size + grown

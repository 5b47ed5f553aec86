"""The GGUF header reader agrees with the gguf package, and survives every kind of broken file with a ModelError (S25)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.model.gguf_header import TENSOR_TYPES, read_gguf
from trireme.model.reader import read_arch


def test_packaged_file_reads_as_the_gguf_package_reads_it() -> None:
    path = find_model("smollm2").path
    ours, oracle = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in oracle.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert ours.alignment == oracle.alignment
    for tensor in oracle.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.kind == tensor.tensor_type.name
        assert mine.shape == tuple(int(dim) for dim in tensor.shape)
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
    assert len(ours.tensors) == len(oracle.tensors)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, block, nbytes) in TENSOR_TYPES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (block, nbytes)
        assert gguf.GGMLQuantizationType(number).name == name


def test_arrays_can_be_skipped() -> None:
    path = find_model("smollm2").path
    assert read_gguf(path, arrays=False).metadata["tokenizer.ggml.tokens"] == []
    assert read_gguf(path, arrays=False).tensors == read_gguf(path).tensors


def test_shape_from_gguf_equals_shape_from_config(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        path = make_tiny(tmp_path / family, family)
        ours, theirs = read_arch(gguf_from_directory(path, tmp_path / f"{family}.gguf")), read_arch(path)
        for name in ("num_layers", "hidden", "num_kv_heads", "head_dim", "ffn", "vocab_size", "qkv_bias", "qk_norm"):
            assert getattr(ours, name) == getattr(theirs, name)
        assert ours.rope == theirs.rope
        assert ours.eos_token_ids == theirs.eos_token_ids
        assert ours.norm_eps == pytest.approx(theirs.norm_eps, rel=1e-6)


# ---------------------------------------------------------------- broken files


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(
    *,
    version: int = 3,
    tensors: int = 0,
    metadata: list[bytes] | None = None,
    count: int | None = None,
    body: bytes = b"",
) -> bytes:
    metadata = metadata or []
    start = b"GGUF" + struct.pack("<IQQ", version, tensors, len(metadata) if count is None else count)
    return start + b"".join(metadata) + body


def tensor(
    name: str = "t", shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, dims: int | None = None
) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return (
        text(name) + struct.pack("<I", len(shape) if dims is None else dims) + sizes + struct.pack("<IQ", kind, offset)
    )


def entry(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


HUGE = 2**64 - 1
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "not gguf": (b"GGML" + bytes(40), "does not begin with GGUF"),
    "old version": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "huge tensor count": (header(tensors=HUGE), "tensor count"),
    "huge metadata count": (header(count=HUGE), "metadata count"),
    "more metadata than bytes": (header(count=60000), "metadata count is 60000"),
    "cut in metadata": (header(count=3), "past the end"),
    "huge key": (header(metadata=[struct.pack("<Q", HUGE)]), "string of"),
    "negative string length": (header(metadata=[entry("k", 8, struct.pack("<q", -1))]), "string of"),
    "string past the end": (header(metadata=[entry("k", 8, struct.pack("<Q", 1000) + b"x")]), "past the end"),
    "key not utf-8": (header(metadata=[struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)]), "not UTF-8"),
    "unknown value type": (header(metadata=[entry("k", 77, b"1234")]), "unknown value type 77"),
    "boolean of 2": (header(metadata=[entry("k", 7, b"\2")]), "neither 0 nor 1"),
    "huge array": (header(metadata=[entry("k", 9, struct.pack("<IQ", 4, HUGE))]), "length of k"),
    "array past the end": (header(metadata=[entry("k", 9, struct.pack("<IQ", 10, 30))]), "past the end"),
    "array of huge strings": (header(metadata=[entry("k", 9, struct.pack("<IQQ", 8, 1, HUGE))]), "string of"),
    "array of strings past the end": (header(metadata=[entry("k", 9, struct.pack("<IQ", 8, 5))]), "past the end"),
    "array of arrays": (header(metadata=[entry("k", 9, struct.pack("<IQ", 9, 1))]), "array of arrays"),
    "key twice": (header(metadata=[entry("k", 0, b"1")] * 2), "appears twice"),
    "alignment 0": (header(metadata=[entry("general.alignment", 4, bytes(4))]), "power of two"),
    "alignment 24": (header(metadata=[entry("general.alignment", 4, struct.pack("<I", 24))]), "power of two"),
    "alignment text": (header(metadata=[entry("general.alignment", 8, text("32"))]), "power of two"),
    "no dimensions": (header(tensors=1, body=tensor(shape=())), "0 dimensions"),
    "many dimensions": (header(tensors=1, body=tensor(dims=2**31)), "dimensions"),
    "dimension 0": (header(tensors=1, body=tensor(shape=(32, 0))), "every dimension"),
    "dimensions that overflow": (header(tensors=1, body=tensor(shape=(2**32, 2**32, 2**3))), "but the file has"),
    "huge dimension": (header(tensors=1, body=tensor(shape=(HUGE - 31,))), "every dimension"),
    "part of a block": (header(tensors=1, body=tensor(shape=(33,), kind=8)), "multiple of the 32 of Q8_0"),
    "unknown tensor type": (header(tensors=1, body=tensor(kind=4)), "unknown type 4"),
    "offset past the end": (header(tensors=1, body=tensor(offset=2**63) + bytes(200)), "but the file has"),
    "offset misaligned": (header(tensors=1, body=tensor(offset=7) + bytes(300)), "multiple of 32"),
    "data cut short": (header(tensors=1, body=tensor() + bytes(100)), "cut short"),
    "tensor twice": (header(tensors=2, body=tensor() * 2 + bytes(400)), "appears twice"),
    "tensors overlap": (header(tensors=2, body=tensor("a") + tensor("b", offset=64) + bytes(400)), "overlap"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_file_is_a_model_error(tmp_path: Path, case: str) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_gguf(path)


def test_smallest_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header())
    assert read_gguf(path).tensors == {}
    path.write_bytes(header(tensors=1, body=tensor() + bytes(300)))
    assert read_gguf(path).tensors["t"].nbytes == 128


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("tiny")
    return gguf_from_directory(make_tiny(directory), directory / "model.gguf", "Q8_0").read_bytes()


def test_every_cut_is_noticed(tmp_path: Path, tiny_gguf: bytes) -> None:
    path = tmp_path / "x.gguf"
    for length in [*range(0, 200), *range(200, len(tiny_gguf) - 32, 997)]:
        path.write_bytes(tiny_gguf[:length])
        with pytest.raises(ModelError):
            read_arch(path)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_crash_the_reader(tmp_path: Path, tiny_gguf: bytes, data: st.DataObject) -> None:
    """Fuzz of the header: what comes out is a shape or a ModelError, never another exception."""
    content = bytearray(tiny_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 12000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(bytes(content))
    try:
        read_arch(path)
    except ModelError:
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"split__count": 2}, "one part of several"),
        ({"llama__rope__scaling__type": "spiral"}, "'spiral'"),
        ({"tokenizer__ggml__eot_token_id": 5000}, "outside the vocabulary"),
    ],
)
def test_unsupported_gguf_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = gguf_from_directory(make_tiny(tmp_path), tmp_path / "x.gguf", **changes)
    with pytest.raises(ModelError, match=message):
        read_arch(path)

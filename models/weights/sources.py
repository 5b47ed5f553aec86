"""Weight sources: safetensors directories and GGUF files behind one interface, memory-mapped, never unpickled.

Weights go by their Hugging Face names. Called by models/load; slices and reorders raw outputs, computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from trireme.errors import ModelError
from trireme.model.gguf_header import LOADED_AS, GgufFile, read_gguf
from trireme.model.quantized import FP8_BLOCK
from trireme.model.stored import safetensors_files
from trireme.models.weights.gguf_expand import dequantize
from trireme.models.weights.grouped import cpu_rows
from trireme.models.weights.packed import (
    BLOCKS,
    E4M3_VALUES,
    GROUPED,
    PACKED_KINDS,
    SCHEMES,
    Bytes,
    Floats,
    bytes_of,
    fp8_block_rows,
    quantize_rows,
    row_bytes,
    scaled_rows,
)
from trireme.models.weights.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from trireme.topology.mesh import Span

DENSE_KINDS = ("F32", "F16", "BF16")
_SCALED_KINDS = {"I8": "INT8", "F8_E4M3": "FP8"}  # dtypes of matrices with separate scales
_SCALE_SUFFIXES = ("_scale", "_scale_inv", ".input_scale")
_KIND_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class RawMatrix(NamedTuple):
    """A matrix [n, k] as stored in a file: uint8 [n, row_bytes], usually a view of the mapped file."""

    kind: str
    raw: Bytes
    n: int
    k: int

    def rows(self, span: Span) -> RawMatrix:
        return RawMatrix(self.kind, self.raw[span.start : span.stop], span.size, self.k)

    def transposed(self) -> RawMatrix:
        """[n, k] -> [k, n] of a dense kind, for weights stored as [inputs, outputs]."""
        size = self.raw.shape[1] // self.k
        columns = bytes_of(self.raw).reshape(self.n, self.k, size).transpose(1, 0, 2)
        return RawMatrix(self.kind, np.ascontiguousarray(columns).reshape(self.k, self.n * size), self.k, self.n)

    def as_kind(self, kind: str) -> RawMatrix:
        """The matrix in a dense kind (F32, F16, BF16), rounded to nearest."""
        return self if kind == self.kind else raw_from_floats(self.as_float32(), kind)

    def as_float32(self) -> Floats:
        """[n, k], a copy."""
        if self.kind == "F32":
            return np.array(self.raw).reshape(-1).view(np.float32).reshape(self.n, self.k)
        if self.kind == "F16":
            with np.errstate(invalid="ignore"):  # NaN stays NaN
                return bytes_of(self.raw).view(np.float16).astype(np.float32).reshape(self.n, self.k)
        if self.kind == "BF16":
            wide = bytes_of(self.raw).view(np.uint16).astype(np.uint32) << np.uint32(16)
            return wide.view(np.float32).reshape(self.n, self.k)
        return dequantize(self.kind, self.raw, self.n, self.k)

    def computable(self, dense: str | None) -> RawMatrix:
        """Converted to a kind that has a CPU kernel: other types per LOADED_AS; dense ones to `dense` if given, a kind or a
        quantization scheme. A matrix whose k is not a multiple of the quant block stays dense."""
        if self.kind in ("FP8", "FP8_BLOCKS"):
            return self.as_kind("F16" if self.kind == "FP8" else "BF16").computable(dense)
        if self.kind in GROUPED:
            return RawMatrix(*cpu_rows(self.kind, self.raw), self.n, self.k)
        if self.kind not in PACKED_KINDS:
            if LOADED_AS.get(self.kind) == "Q8_0":
                return RawMatrix(*quantize_rows("q8_0", self.as_float32()), self.n, self.k)
            return self.as_kind("F16")
        if dense is None or self.kind not in DENSE_KINDS:
            return self
        if dense in SCHEMES:
            fits = self.k % BLOCKS[SCHEMES[dense]][0] == 0
            return RawMatrix(*quantize_rows(dense, self.as_float32()), self.n, self.k) if fits else self
        return self.as_kind(dense)


def raw_from_floats(values: Floats, kind: str = "F32") -> RawMatrix:
    """A float32 matrix [n, k] as a raw matrix of a dense kind, rounded to nearest, ties to even."""
    n, k = values.shape
    stored: np.ndarray = values
    if kind == "F16":
        with np.errstate(over="ignore", invalid="ignore"):  # float16 overflows to inf
            stored = values.astype(np.float16)
    elif kind == "BF16":
        stored = bf16_from_floats(values)
    return RawMatrix(kind, bytes_of(stored).reshape(n, row_bytes(kind, k)), n, k)


def bf16_from_floats(values: Floats) -> np.ndarray:
    """Bits of bfloat16 as uint16, rounded to nearest, ties to even; any NaN becomes the quiet one."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    half = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (half + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def dense_kind(dtype: str) -> str | None:
    """Kind of dense weights for a --dtype; None keeps the stored one."""
    return None if dtype == "auto" else _KIND_OF_DTYPE[dtype]


class WeightSource(Protocol):
    """Weights by Hugging Face name."""

    path: Path

    def names(self) -> set[str]:
        """All names in the file; tensors without a Hugging Face name keep their own."""
        ...

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        """The raw matrix. Raises ModelError naming it if the shape is not [n, k]."""
        ...

    def vector(self, name: str, size: int) -> Floats:
        """A float32 copy of a vector. Raises ModelError naming it if it does not have `size` values."""
        ...


class TensorSource(Protocol):
    """What a safetensors WeightSource offers in addition, e.g. models/cpu/embed_head.PrefixedSource."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        """A torch tensor on the host, of any rank, in the stored dtype."""
        ...


class SafetensorsSource:
    """A directory of safetensors files, with or without an index. The scales of int8 and float8 matrices, NAME_scale
    (NAME_scale_inv for blocks), and their input scales are not listed as weights."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._file_of: dict[str, SafetensorsFile] = {}
        for path in safetensors_files(directory):
            file = SafetensorsFile(path)
            for name in file.names():
                if name in self._file_of:
                    raise ModelError(f"{name} is in {self._file_of[name].path.name} and in {path.name}")
                self._file_of[name] = file

    def names(self) -> set[str]:
        return {name for name in self._file_of if not self._is_scale(name)}

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        stored = self.tensor(name, (n, k))
        if stored.dtype in _SCALED_KINDS:
            return self._scaled(name, stored, n, k)
        kind = self._dense_kind(name, stored)
        return RawMatrix(kind, stored.raw.reshape(n, row_bytes(kind, k)), n, k)

    def vector(self, name: str, size: int) -> Floats:
        shape = self._file_of[name].shape(name)  # per-head norms are stored as a matrix
        stored = self.tensor(name, shape if math.prod(shape) == size else (size,))
        kind = self._dense_kind(name, stored)
        return RawMatrix(kind, stored.raw.reshape(1, row_bytes(kind, size)), 1, size).as_float32().reshape(size)

    def size(self, name: str) -> int:
        """Number of values of a tensor."""
        return math.prod(self._file_of[name].shape(name))

    def tensor(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """A memory-mapped tensor in its stored dtype. Raises ModelError for another shape."""
        file = self._file_of[name]
        if file.shape(name) != shape:
            raise ModelError(
                f"{name} in {file.path} has shape {list(file.shape(name))}; config.json asks for {list(shape)}"
            )
        return file.tensor(name)

    def _is_scale(self, name: str) -> bool:
        for suffix in _SCALE_SUFFIXES:
            matrix = name.removesuffix(suffix) + (".weight" if suffix == ".input_scale" else "")
            if name.endswith(suffix) and matrix in self._file_of:
                return self._file_of[matrix].dtype(matrix) in _SCALED_KINDS
        return False

    def _scaled(self, name: str, stored: StoredTensor, n: int, k: int) -> RawMatrix:
        """An int8 or float8 matrix with a scale per output or per 128 x 128 quant block; BF16 if k is no whole number of
        quant blocks. Raises ModelError for missing, ambiguous or misshapen scales."""
        kind, codes = _SCALED_KINDS[stored.dtype], stored.raw.reshape(n, k)
        file = self._file_of.get(name + "_scale") or self._file_of.get(name + "_scale_inv")
        if name + "_scale" in self._file_of and name + "_scale_inv" in self._file_of:
            raise ModelError(f"{name} in {self._file_of[name].path} has two scales: {name}_scale and {name}_scale_inv")
        if file is None:
            what = DTYPES[stored.dtype][1].removesuffix("_e4m3fn")
            raise ModelError(f"{name} in {self._file_of[name].path} is of {what} and has no scales in {name}_scale")
        scale_name = name + ("_scale" if name + "_scale" in self._file_of else "_scale_inv")
        shape = file.shape(scale_name)
        if math.prod(shape) in (1, n):
            scales = np.broadcast_to(self.vector(scale_name, math.prod(shape)), n)
            return RawMatrix(kind, scaled_rows(kind, codes, scales), n, k)
        blocks = (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK))
        if kind != "FP8" or shape != blocks:
            raise ModelError(f"{scale_name} in {file.path} has shape {list(shape)}; {name} is {n} x {k}")
        scales = self.vector(scale_name, math.prod(shape)).reshape(shape)
        if k % FP8_BLOCK == 0:
            return RawMatrix("FP8_BLOCKS", fp8_block_rows(codes, scales.repeat(FP8_BLOCK, 0)[:n]), n, k)
        wide = scales.repeat(FP8_BLOCK, 0)[:n].repeat(FP8_BLOCK, 1)[:, :k]
        return raw_from_floats(E4M3_VALUES[codes] * wide, "BF16")

    def _dense_kind(self, name: str, stored: StoredTensor) -> str:
        if stored.dtype not in DENSE_KINDS:
            raise ModelError(
                f"{name} in {self._file_of[name].path} has dtype {DTYPES[stored.dtype][1]}; "
                "supported: float32, float16, bfloat16, and int8 and float8_e4m3fn for matrices"
            )
        return stored.dtype


_GGUF_LAYER = {
    "attn_qkv": "self_attn.qkv_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


def name_from_gguf(name: str, special: Mapping[str, str] | None = None) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names are returned unchanged. `special`
    overrides name parts for a family."""
    layer_names = {**_GGUF_LAYER, **(special or {})}
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    return name


class GgufSource:
    """A memory-mapped GGUF file. With `interleaved_head_dim` > 0 the outputs of q and k are stored as rotary pairs
    (i, i + 1) and reordered into halves (i, i + head_dim / 2), which is what the kernels rotate."""

    def __init__(self, path: Path, *, interleaved_head_dim: int = 0, special: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._file: GgufFile = read_gguf(path, arrays=False)
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._name_of = named_once(((name_from_gguf(name, special), name) for name in self._file.tensors), path)
        self._pair_dim = interleaved_head_dim

    def names(self) -> set[str]:
        return set(self._name_of)

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        kind, raw = self._bytes(name, (k, n))
        rows = raw.reshape(n, row_bytes(kind, k))
        if self._pair_dim and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = rows[_halves_from_pairs(n, self._pair_dim)]
        return RawMatrix(kind, rows, n, k)

    def vector(self, name: str, size: int) -> Floats:
        kind, raw = self._bytes(name, self._flat(name, size))
        values = RawMatrix(kind, raw.reshape(1, -1), 1, size).as_float32().reshape(size)
        if self._pair_dim and name.endswith(("q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")):
            values = values[_halves_from_pairs(size, self._pair_dim)]
        return values

    def _flat(self, name: str, size: int) -> tuple[int, ...]:
        """Stored shape of a vector of `size` values: per-head norms are stored as a matrix."""
        shape = self._file.tensors[self._name_of[name]].shape
        return shape if math.prod(shape) == size else (size,)

    def _bytes(self, name: str, shape: tuple[int, ...]) -> tuple[str, Bytes]:
        tensor = self._file.tensors[self._name_of[name]]
        if tensor.shape != shape:
            raise ModelError(
                f"{tensor.name} in {self.path} has shape {list(tensor.shape)}; its metadata asks for {list(shape)}"
            )
        return tensor.kind, np.asarray(self._data[tensor.offset : tensor.offset + tensor.nbytes])


def _halves_from_pairs(rows: int, head_dim: int) -> np.ndarray:
    """Output order that moves ggml's pairs (0, 1), (2, 3), ... of each head into halves: evens first, then odds."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def named_once(pairs: Iterable[tuple[str, str]], path: Path) -> dict[str, str]:
    """{name: stored name} of (name, stored name) pairs. Raises ModelError if two stored weights map to one name."""
    found: dict[str, str] = {}
    for name, stored in pairs:
        if name in found:
            raise ModelError(
                f"{path} holds {found[name]} and {stored}, which are the same weight of this model ({name})"
            )
        found[name] = stored
    return found


def check_names(source: WeightSource, wanted: Iterable[str], ignorable: Iterable[str]) -> None:
    """Raises ModelError naming missing weights or weights the model does not use."""
    have, want = source.names(), set(wanted)
    missing = sorted(want - have)
    unused = sorted(have - want - set(ignorable))
    for names, what in ((missing, "lacks"), (unused, "holds weights this model does not use:")):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelError(f"{source.path} {what} {', '.join(names[:8])}{more}")

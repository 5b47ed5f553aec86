"""Where weights come from: safetensors directories and GGUF files behind one interface, memory-mapped, never unpickled.

Names are Hugging Face's on both sides. Called by models/load and models/arch; cuts and reorders raw rows, computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.quant.base import PACKED_KINDS, SCHEMES, Bytes, bytes_of, kind_of, quantize, row_bytes
from models.quant.gguf_expand import dequantize
from trireme.errors import ModelError
from trireme.gguf import GgufFile, read_gguf
from trireme.mesh import Span
from trireme.packaged import read_json

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KIND_OF_DTYPE = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class RawMatrix(NamedTuple):
    """A matrix [n, k] as it lies in a file: uint8 [n, row_bytes], usually a view of the mapped file."""

    kind: str
    raw: Bytes
    n: int
    k: int

    def rows(self, span: Span) -> RawMatrix:
        return RawMatrix(self.kind, self.raw[span.start : span.stop], span.size, self.k)

    def as_kind(self, kind: str) -> RawMatrix:
        """The matrix in a dense kind (F32, F16, BF16), rounded to nearest."""
        if kind == self.kind:
            return self
        return raw_from_tensor(self.as_float32().to(_TORCH_DTYPES[kind]))

    def as_float32(self) -> Tensor:
        if self.kind in _TORCH_DTYPES:
            copied = torch.from_numpy(np.array(self.raw).reshape(-1))
            return copied.view(_TORCH_DTYPES[self.kind]).view(self.n, self.k).float()
        return dequantize(self.kind, self.raw, self.n, self.k)

    def computable(self, dense: str | None) -> RawMatrix:
        """As a kind that has a kernel: other block types become F16; dense ones become `dense`, a kind or a rounding
        scheme, when that is given. Rows that are no whole blocks stay dense."""
        if self.kind not in PACKED_KINDS:
            return self.as_kind("F16")
        if dense is None or self.kind not in _TORCH_DTYPES:
            return self
        if dense in SCHEMES:
            return self if self.k % 32 else RawMatrix(*quantize(dense, self.as_float32()), self.n, self.k)
        return self.as_kind(dense)


def raw_from_tensor(tensor: Tensor) -> RawMatrix:
    """A dense [n, k] tensor as raw rows, without a copy where it is contiguous."""
    n, k = tensor.shape
    kind = kind_of(tensor)
    return RawMatrix(kind, bytes_of(tensor).reshape(n, row_bytes(kind, k)), n, k)


def dense_kind(dtype: str) -> str | None:
    """Kind of dense weights for a --dtype; None keeps the stored one."""
    return None if dtype == "auto" else _KIND_OF_DTYPE[dtype]


class WeightSource(Protocol):
    """Weights by Hugging Face name."""

    path: Path

    def names(self) -> set[str]:
        """All names in the file; those that have no Hugging Face name keep their own."""
        ...

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        """The raw matrix, which must have this shape. Raises ModelError that names it."""
        ...

    def vector(self, name: str, size: int) -> Tensor:
        """A float32 copy of a vector, likewise."""
        ...


class SafetensorsSource:
    """A directory of safetensors files, with or without an index."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._file_of: dict[str, Path] = {}
        self._open = {}
        for file in _safetensors_files(directory):
            try:
                # (the library checks every offset of the header, and maps the file)
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is not a safetensors file: {error}") from error
            self._open[file] = handle
            for name in handle.keys():  # noqa: SIM118
                if name in self._file_of:
                    raise ModelError(f"{name} is in {self._file_of[name].name} and in {file.name}")
                self._file_of[name] = file

    def names(self) -> set[str]:
        return set(self._file_of)

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        return raw_from_tensor(self.tensor(name, (n, k)))

    def vector(self, name: str, size: int) -> Tensor:
        shape = tuple(self._open[self._file_of[name]].get_slice(name).get_shape())  # (norms of each head: a matrix)
        return self.tensor(name, shape if math.prod(shape) == size else (size,)).float().flatten().clone()

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of any dtype as stored, mapped, which must have this shape."""
        file = self._file_of[name]
        try:
            tensor: Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"cannot read {name} from {file}: {error}") from error
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} in {file} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
        return tensor


def _safetensors_files(directory: Path) -> list[Path]:
    """The files that hold the model: those of the index, else model.safetensors, else the only one."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        single = directory / "model.safetensors"
        found = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
        if len(found) != 1:
            raise ModelError(f"{directory} holds {len(found)} safetensors files and no model.safetensors.index.json")
        return found
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} lacks weight_map")
    files = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is not a file of its directory")
        if not (directory / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing", hint=f"download {name} into {directory}")
        files.append(directory / name)
    return files


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
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; names that are not known stay as they are. `special`
    are the parts that mean something else in a family."""
    layer_names = {**_GGUF_LAYER, **(special or {})}
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[1].isdecimal() and parts[2] in layer_names:
        return f"model.layers.{parts[1]}.{layer_names[parts[2]]}.{parts[3]}"
    return name


class GgufSource:
    """A memory-mapped GGUF file. With `interleaved_head_dim` > 0 the rows of q and k are stored in pairs (i, i + 1) and are
    put back into halves (i, i + head_dim / 2), which is what the kernels rotate."""

    def __init__(self, path: Path, *, interleaved_head_dim: int = 0, special: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._file: GgufFile = read_gguf(path, arrays=False)
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._name_of = {name_from_gguf(name, special): name for name in self._file.tensors}
        self._pair_dim = interleaved_head_dim

    def names(self) -> set[str]:
        return set(self._name_of)

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        kind, raw = self._bytes(name, (k, n))
        rows = raw.reshape(n, row_bytes(kind, k))
        if self._pair_dim and name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = rows[_halves_from_pairs(n, self._pair_dim)]
        return RawMatrix(kind, rows, n, k)

    def vector(self, name: str, size: int) -> Tensor:
        kind, raw = self._bytes(name, self._flat(name, size))
        values = RawMatrix(kind, raw.reshape(1, -1), 1, size).as_float32().view(size)
        if self._pair_dim and name.endswith(("q_proj.bias", "k_proj.bias", "q_norm.weight", "k_norm.weight")):
            values = values[torch.from_numpy(_halves_from_pairs(size, self._pair_dim))]
        return values.clone()

    def _flat(self, name: str, size: int) -> tuple[int, ...]:
        """The shape in which a vector of `size` lies in the file: norms of each head are a matrix."""
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
    """Row order that turns ggml's pairs (0, 1), (2, 3), ... of each head into halves: evens first, then odds."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def check_names(source: WeightSource, wanted: Iterable[str], ignorable: Iterable[str]) -> None:
    """Raises ModelError that names missing weights, or weights nobody will use."""
    have, want = source.names(), set(wanted)
    missing = sorted(want - have)
    unused = sorted(have - want - set(ignorable))
    for names, what in ((missing, "lacks"), (unused, "holds weights this model does not use:")):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ModelError(f"{source.path} {what} {', '.join(names[:8])}{more}")

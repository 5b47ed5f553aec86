"""Reads safetensors files: header checked against the file, tensors as views of the mapped file. No torch.

Used by models/weights/sources. A file is untrusted input: the header's length, every shape, dtype and offset are checked before a
byte of data is touched, and every defect is a ModelError. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trireme.errors import ModelError

MAX_HEADER = 100 << 20
MAX_DIMS = 16
# dtype of the format -> (bytes of an element, its usual name)
DTYPES = {
    **{"F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")},
    **{"I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"), "BOOL": (1, "bool")},
    **{"U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8")},
    **{"F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu")},
}


class StoredTensor(NamedTuple):
    """A tensor as it lies in a file: `raw` is uint8, flat, a view of the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class SafetensorsFile:
    """One file. Tensors stay valid while they are referenced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="c")  # private, never written
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not a safetensors file: {error}") from error
        self._start, entries = self._read_header()
        self._entries = self._checked(entries)

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name].shape)

    def dtype(self, name: str) -> str:
        """The format's own name of it, such as BF16."""
        return self._entries[name].dtype

    def tensor(self, name: str) -> StoredTensor:
        """A tensor that is in names()."""
        entry = self._entries[name]
        begin, end = (self._start + offset for offset in entry.data_offsets)
        return StoredTensor(entry.dtype, tuple(entry.shape), np.asarray(self._data[begin:end]))

    def _read_header(self) -> tuple[int, dict[str, _Entry]]:
        size = self._data.size
        length = struct.unpack("<Q", self._data[:8].tobytes())[0] if size >= 8 else 0
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise self._bad(f"a header of {length} bytes in a file of {size}")
        try:
            fields = msgspec.json.decode(self._data[8 : 8 + length].tobytes(), type=dict[str, msgspec.Raw])
            fields.pop("__metadata__", None)
            return 8 + length, {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
        except msgspec.DecodeError as error:
            raise self._bad(str(error)) from error

    def _checked(self, entries: dict[str, _Entry]) -> dict[str, _Entry]:
        """The entries, which must fill the rest of the file one after the other."""
        at = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise self._bad(f"{name} is of the unknown type {entry.dtype}")
            if len(entry.shape) > MAX_DIMS or any(dim < 0 for dim in entry.shape):
                raise self._bad(f"{name} has shape {entry.shape}")
            begin, end = entry.data_offsets
            need = math.prod(entry.shape) * DTYPES[entry.dtype][0]
            if begin != at or end - begin != need:
                raise self._bad(f"{name} lies at bytes {begin} to {end}; {need} bytes from {at} on are expected")
            at = end
        if self._start + at != self._data.size:
            raise self._bad(f"its tensors end at byte {self._start + at}; the file has {self._data.size}")
        return entries

    def _bad(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is not a safetensors file: {what}")

"""Reads safetensors files: tensors as views of the mapped file. No torch.

Used by models/weights/sources. A file is untrusted input: trireme/model/stored.py validates its header before any data is
read, and every defect raises ModelError.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ModelError
from trireme.model.stored import DTYPES as DTYPES
from trireme.model.stored import read_header


class StoredTensor(NamedTuple):
    """A tensor as stored in a file: `raw` is flat uint8, a view of the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    raw: NDArray[np.uint8]


class SafetensorsFile:
    """One file. Tensors stay valid while they are referenced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._start, self._entries = header.start, header.entries
        try:
            self._data = np.memmap(path, dtype=np.uint8, mode="c")  # private, never written
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot map {path}: {error}") from error
        if self._data.size != header.size:
            raise ModelError(f"{path} is being written: it had {header.size} bytes, and has {self._data.size}")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name].shape)

    def dtype(self, name: str) -> str:
        """The format's name of the dtype, such as BF16."""
        return self._entries[name].dtype

    def tensor(self, name: str) -> StoredTensor:
        """The tensor `name`, which must be in names()."""
        entry = self._entries[name]
        begin, end = (self._start + offset for offset in entry.data_offsets)
        return StoredTensor(entry.dtype, tuple(entry.shape), np.asarray(self._data[begin:end]))

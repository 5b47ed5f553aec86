"""Headers of safetensors files: the tensors of a checkpoint, their types, shapes and locations. Torch- and numpy-free.

Used by the arch reader, the budget and models/weights/safetensors_file. A file is untrusted input: the header's length, every
shape, type and offset are checked before use, and every defect is a ModelError. Format:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import functools
import math
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from trireme.errors import ModelError
from trireme.model.files import read_json

MAX_HEADER = 100 << 20
MAX_DIMS = 16
# safetensors dtype -> (bytes per element, common name)
DTYPES = {
    **{"F64": (8, "float64"), "F32": (4, "float32"), "F16": (2, "float16"), "BF16": (2, "bfloat16")},
    **{"I64": (8, "int64"), "I32": (4, "int32"), "I16": (2, "int16"), "I8": (1, "int8"), "BOOL": (1, "bool")},
    **{"U64": (8, "uint64"), "U32": (4, "uint32"), "U16": (2, "uint16"), "U8": (1, "uint8")},
    **{"F8_E4M3": (1, "float8_e4m3fn"), "F8_E5M2": (1, "float8_e5m2"), "F8_E8M0": (1, "float8_e8m0fnu")},
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file. `data_offsets` are relative to the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class Header(NamedTuple):
    """A parsed header; `start` is the byte after it, `size` the size of the whole file."""

    start: int
    size: int
    entries: dict[str, Entry]


class Placed(NamedTuple):
    """One tensor of a checkpoint: bytes `begin` to `end` of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> Header:
    """The validated header of one file. Raises ModelError for any defect, and for anything but a regular file."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"{path} is not a regular file")
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0] if found.st_size >= 8 else 0
            if not 2 <= length <= min(MAX_HEADER, found.st_size - 8):
                raise _bad(path, f"a header of {length} bytes in a file of {found.st_size}")
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=_hint_of(path)) from error
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(each, type=Entry) for name, each in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(path, f"its header: {error}") from error
    header = Header(8 + length, found.st_size, entries)
    _check(path, header)
    return header


def _check(path: Path, header: Header) -> None:
    """Raises ModelError unless the entries fill the rest of the file without gaps."""
    at = 0
    for name, entry in sorted(header.entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in DTYPES:
            raise _bad(path, f"{name} is of the unknown type {entry.dtype}")
        if len(entry.shape) > MAX_DIMS or any(dim < 0 for dim in entry.shape):
            raise _bad(path, f"{name} has shape {entry.shape}")
        begin, end = entry.data_offsets
        need = math.prod(entry.shape) * DTYPES[entry.dtype][0]
        if begin != at or end - begin != need:
            raise _bad(path, f"{name} lies at bytes {begin} to {end}; {need} bytes from {at} on are expected")
        at = end
    if header.start + at != header.size:
        raise _bad(path, f"its tensors end at byte {header.start + at}; the file has {header.size}")


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(f"{path} is not a safetensors file: {what}")


def _hint_of(path: Path) -> str:
    """A hint for dangling links: download caches consist of links whose targets may have been cleaned up."""
    return f"{path.name} is a link to {os.readlink(path)}: download it again" if path.is_symlink() else ""


def safetensors_files(directory: Path) -> list[Path]:
    """The files that hold the model: those of the index, else model.safetensors, else the only one. Raises ModelError."""
    index = directory / "model.safetensors.index.json"
    weight_map = read_json(index).get("weight_map") if index.is_file() or index.is_symlink() else {}
    if weight_map == {}:
        single = directory / "model.safetensors"
        found = [single] if os.path.lexists(single) else sorted(directory.glob("*.safetensors"))
        if len(found) != 1:
            raise ModelError(f"{directory} holds {len(found)} safetensors files and no model.safetensors.index.json")
        return found
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index} lacks weight_map")
    files = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or "\0" in name:
            raise ModelError(f"{index} names {name!r}, which is not a file of its directory")
        path = directory / name
        if not path.is_file():
            hint = _hint_of(path) or f"download {name} into {directory}"
            raise ModelError(f"{index} names {name}, which is missing", hint=hint)
        files.append(path)
    return files


def stored_tensors(directory: Path) -> dict[str, Placed]:
    """All tensors of a checkpoint. Raises ModelError for a broken file, and for a tensor stored in two files."""
    files = safetensors_files(directory)
    return _stored_tensors(tuple((path, *_version(path)) for path in files))


@functools.lru_cache(maxsize=1)
def _stored_tensors(files: tuple[tuple[Path, int, int], ...]) -> dict[str, Placed]:
    """Cached, since several parts of one process need it; read again when a file changes."""
    found: dict[str, Placed] = {}
    for path, _, _ in files:
        header = read_header(path)
        for name, entry in header.entries.items():
            if name in found:
                raise ModelError(f"{name} is in {found[name].path.name} and in {path.name}")
            begin, end = (header.start + offset for offset in entry.data_offsets)
            found[name] = Placed(path, entry.dtype, tuple(entry.shape), begin, end)
    return found


def size_of(path: Path) -> int:
    """Bytes of a file. Raises ModelError where there is none, as behind a dangling link."""
    return _version(path)[0]


def _version(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=_hint_of(path)) from error
    return found.st_size, found.st_mtime_ns


def have_same_bytes(one: Placed, other: Placed) -> bool:
    """Whether two tensors have the same type, shape and bytes. Raises ModelError where a file cannot be read."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip(_pieces(one), _pieces(other), strict=True))


def _pieces(tensor: Placed, size: int = 1 << 22) -> Iterable[bytes]:
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.begin)
            for at in range(tensor.begin, tensor.end, size):
                yield file.read(min(size, tensor.end - at))
    except OSError as error:
        raise ModelError(f"cannot read {tensor.path}: {error.strerror}") from error

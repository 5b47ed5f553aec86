"""Reads the header of a GGUF file: metadata and the location of each tensor. Torch- and numpy-free.

Used by the arch reader, the tokenizer and the weight loader. A file is untrusted input: every count, length and offset is checked
against the file's size before use, no allocation is sized by a number in the file alone, and every defect is a ModelError.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import functools
import math
import mmap
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from trireme.errors import ModelError

MAGIC = b"GGUF"
MAX_METADATA = 1 << 16
MAX_TENSORS = 1 << 18
MAX_KEY_BYTES = 1 << 16
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 24
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 1 << 20

# ggml type id -> (name, elements per quant block, bytes per quant block)
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}

# Types without a kernel, and the type their matrices are expanded to at load: those with few levels, to 8-bit quant blocks.
LOADED_AS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"), "Q8_0"),
    **dict.fromkeys(("Q8_K", "F64"), "F16"),
}
_SIZES = {name: (size, nbytes) for name, size, nbytes in TENSOR_TYPES.values()}

_SCALARS: dict[int, str] = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _BOOL = 8, 9, 7

Scalar = int | float | bool | str
T = TypeVar("T", str, int, float, bool)


class GgufTensor(NamedTuple):
    """Location of one tensor. `shape` has the row length first, as in ggml; `offset` is from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def row_length(self) -> int:
        return self.shape[0]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def loaded_bytes(self) -> int:
        """Bytes in memory: more than in the file if no kernel computes with its type."""
        size, nbytes = _SIZES[LOADED_AS.get(self.kind, self.kind)]
        return math.prod(self.shape) // size * nbytes


class GgufFile(NamedTuple):
    """A parsed header. Array values are lists; the methods below read `metadata` by type. `strings` has the length and the last
    item of each list of strings, kept or not."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Scalar | list[Scalar]]
    tensors: dict[str, GgufTensor]
    strings: dict[str, tuple[int, str]]

    def text(self, key: str, default: str | None = None) -> str:
        """String value of `key`. Raises ModelError when it is absent (and there is no default) or of another type."""
        return self._typed(key, default, str, "a string")

    def whole(self, key: str, default: int | None = None) -> int:
        """Integer value of `key`, likewise."""
        return self._typed(key, default, int, "an integer")

    def real(self, key: str, default: float | None = None) -> float:
        """Float (or integer) value of `key`, likewise; NaN and infinity are rejected."""
        value = self.metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        number = self._typed(key, default, float, "a number")
        if not math.isfinite(number):
            raise ModelError(f"{self.path}: {key} is {number}")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._typed(key, default, bool, "true or false")

    def texts(self, key: str) -> list[str]:
        """List of strings under `key`. Raises ModelError when absent or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or set(map(type, value)) - {str}:
            raise ModelError(f"{self.path}: {key} must be a list of strings")
        return cast(list[str], value)

    def numbers(self, key: str) -> list[float]:
        """List of numbers under `key`, likewise; integral ones may be of type int."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or str in set(map(type, value)):
            raise ModelError(f"{self.path}: {key} must be a list of numbers")
        return cast(list[float], value)

    def _typed(self, key: str, default: T | None, kind: type[T], words: str) -> T:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} lacks {key}")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.path}: {key} must be {words}, not {type(value).__name__}")
        return value


def read_gguf(path: str | Path, *, arrays: bool = True) -> GgufFile:
    """Parses the header. With `arrays=False` the items of array values are checked but not kept ([] replaces them), which is all
    that an ArchSpec needs. Raises ModelError for any defect."""
    path = Path(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"{path} is not a regular file")
        return _read_shape(path, found.st_size, found.st_mtime_ns) if not arrays else _read(path, arrays=True)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error


@functools.lru_cache(maxsize=1)
def _read_shape(path: Path, size: int, mtime_ns: int) -> GgufFile:
    """A header without its arrays, cached since several parts of one process need it; parsed again when the file changes."""
    return _read(path, arrays=False)


def _read(path: Path, *, arrays: bool) -> GgufFile:
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < 24:
            raise ModelError(f"{path} is {size} bytes: too short for a GGUF header")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data, size, arrays).read()


class _Reader:
    """A cursor over the header. Every read goes through `take`, which checks for the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int, arrays: bool) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 0
        self.arrays = arrays
        self.lists: dict[str, tuple[int, str]] = {}

    def read(self) -> GgufFile:
        """The whole header: magic, version, metadata and tensor table. Raises ModelError for any defect."""
        if self.data[:4] != MAGIC:
            raise ModelError(f"{self.path} does not begin with GGUF")
        self.at = 4
        version = self.u32()
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            why = "a big-endian file" if swapped in (2, 3) else f"GGUF version {version}"
            raise ModelError(f"{self.path} is {why}; little-endian versions 2 and 3 can be read")
        num_tensors = self.count("tensor count", MAX_TENSORS)
        num_metadata = self.count("metadata count", MAX_METADATA)
        metadata: dict[str, Scalar | list[Scalar]] = {}
        for _ in range(num_metadata):
            key = self.string(MAX_KEY_BYTES)
            if key in metadata:
                raise self.bad(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.u32(), key)
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or isinstance(alignment, bool)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self.bad(f"general.alignment is {alignment!r}, not a power of two up to {MAX_ALIGNMENT}")
        relative = [self.tensor() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        tensors = self.place(relative, start, alignment)
        return GgufFile(self.path, version, alignment, metadata, tensors, self.lists)

    def place(self, relative: list[GgufTensor], start: int, alignment: int) -> dict[str, GgufTensor]:
        """Absolute offsets. Raises ModelError for tensors that are misaligned, outside the file, duplicated or overlapping."""
        tensors: dict[str, GgufTensor] = {}
        for tensor in relative:
            if tensor.name in tensors:
                raise self.bad(f"tensor {tensor.name!r} appears twice")
            if tensor.offset % alignment:
                raise self.bad(f"tensor {tensor.name!r} is at offset {tensor.offset}, not a multiple of {alignment}")
            end = start + tensor.offset + tensor.nbytes
            if end > self.size:
                raise self.bad(
                    f"tensor {tensor.name!r} ends at byte {end}, but the file has {self.size}: the file is cut short or broken"
                )
            tensors[tensor.name] = tensor._replace(offset=start + tensor.offset)
        placed = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in zip(placed, placed[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                raise self.bad(f"tensors {before.name!r} and {after.name!r} overlap")
        return tensors

    def tensor(self) -> GgufTensor:
        """One entry of the tensor table, its offset relative to the data section. Raises ModelError for a bad shape, type or
        size."""
        name = self.string(MAX_KEY_BYTES)
        num_dims = self.u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.bad(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        shape = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        kind_id = self.u32()
        offset = int(struct.unpack("<Q", self.take(8))[0])
        if kind_id not in TENSOR_TYPES:
            raise self.bad(f"tensor {name!r} has unknown type {kind_id}")
        kind, block, block_bytes = TENSOR_TYPES[kind_id]
        if not all(1 <= dim <= MAX_DIM for dim in shape):
            raise self.bad(f"tensor {name!r} has shape {list(shape)}; every dimension must be 1 to {MAX_DIM}")
        if shape[0] % block:
            raise self.bad(f"tensor {name!r} has rows of {shape[0]}, not a multiple of the {block} of {kind}")
        nbytes = math.prod(shape) // block * block_bytes
        if nbytes > self.size or offset > self.size:
            raise self.bad(f"tensor {name!r} needs {nbytes} bytes at {offset}, but the file has {self.size}")
        return GgufTensor(name, kind, shape, offset, nbytes)

    def value(self, kind: int, key: str) -> Scalar | list[Scalar]:
        if kind == _STRING:
            return self.string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self.array(key)
        return next(self.scalars(kind, 1, key))

    def array(self, key: str) -> list[Scalar]:
        """An array value; [] in place of its items when arrays are not kept. Raises ModelError for nested arrays."""
        kind = self.u32()
        num_items = self.count(f"length of {key}", MAX_ARRAY_ITEMS)
        if kind == _STRING:
            return self.strings(num_items, key)
        if kind == _ARRAY:
            raise self.bad(f"{key} is an array of arrays, which no known model uses")
        items = self.scalars(kind, num_items, key)
        return list(items) if self.arrays else []

    def strings(self, num_items: int, key: str) -> list[Scalar]:
        """The long arrays of a file (tokens, merges): bounds are checked as in `string`, in one tight loop."""
        data, size, at, keep = self.data, self.size, self.at, self.arrays
        items: list[Scalar] = []
        unpack_length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(num_items):
                if at + 8 > size:
                    raise self.cut_short()
                length = unpack_length(data, at)[0]
                at += 8
                if length > MAX_STRING_BYTES or at + length > size:
                    raise self.bad(f"a string of {length} bytes at byte {at}; the file has {size}")
                if keep:
                    items.append(data[at : at + length].decode("utf-8"))
                at += length
            self.lists[key] = num_items, data[at - length : at].decode("utf-8") if num_items else ""
        except UnicodeDecodeError as error:
            raise self.bad(f"a string at byte {at} is not UTF-8") from error
        self.at = at
        return items

    def scalars(self, kind: int, num_items: int, key: str) -> Iterator[Scalar]:
        """`num_items` numbers or booleans of the value type `kind`. Raises ModelError for an unknown type."""
        code = _SCALARS.get(kind)
        if code is None:
            raise self.bad(f"{key} has unknown value type {kind}")
        raw = self.take(struct.calcsize("<" + code) * num_items)
        if kind == _BOOL and raw.strip(b"\0\1"):
            raise self.bad(f"{key} holds a boolean that is neither 0 nor 1")
        return iter(struct.unpack(f"<{num_items}{code}", raw))

    def string(self, most: int) -> str:
        """A length-prefixed UTF-8 string of at most `most` bytes. Raises ModelError."""
        length = int(struct.unpack("<Q", self.take(8))[0])
        if length > most:
            raise self.bad(f"a string of {length} bytes at byte {self.at}; at most {most} are possible")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"a string at byte {self.at} is not UTF-8") from error

    def count(self, what: str, most: int) -> int:
        number = int(struct.unpack("<Q", self.take(8))[0])
        if number > most or number > self.size:
            raise self.bad(f"{what} is {number}; at most {min(most, self.size)} are possible")
        return number

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def take(self, num_bytes: int) -> bytes:
        if num_bytes > self.size - self.at:
            raise self.cut_short()
        raw = self.data[self.at : self.at + num_bytes]
        self.at += num_bytes
        return raw

    def bad(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is not a valid GGUF file: {what}")

    def cut_short(self) -> ModelError:
        return self.bad(f"the header runs past the end of the file ({self.size} bytes)")

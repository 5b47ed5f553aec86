"""Columns of integers inside messages, as bytes: little-endian int32 (slots, tokens, counts), int64 (request ids) or flags.

A column costs the codec one copy, however long it is. Lengths are checked when a message is made or decoded (`check_columns`);
value ranges are checked by whoever uses them as indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = bytes
"""Packed int32."""
Ids: TypeAlias = bytes
"""Packed int64."""
Flags: TypeAlias = bytes
"""One byte each, 0 or 1."""

_INT32, _INT64 = np.dtype("<i4"), np.dtype("<i8")


def pack(values: Sequence[int] | NDArray[np.integer]) -> Column:
    """Integers as packed int32. Raises OverflowError for a list with one that does not fit."""
    return np.asarray(values, _INT32).tobytes() if len(values) else b""


def unpack(column: Column) -> NDArray[np.int32]:
    """A read-only view of packed int32."""
    return np.frombuffer(column, _INT32)


@lru_cache(maxsize=64)
def repeated(value: int, count: int) -> Column:
    """A column that repeats one value."""
    return pack(np.full(count, value))


def pack_ids(values: Sequence[int] | NDArray[np.integer]) -> Ids:
    """Request ids as packed int64."""
    return np.asarray(values, _INT64).tobytes()


def unpack_ids(column: Ids) -> NDArray[np.int64]:
    """A read-only view of packed int64."""
    return np.frombuffer(column, _INT64)


def pack_flags(values: Sequence[bool] | NDArray[np.bool_]) -> Flags:
    """Booleans, one byte each."""
    return np.asarray(values, np.bool_).tobytes()


def unpack_flags(column: Flags) -> NDArray[np.bool_]:
    """Booleans; any byte but 0 is true."""
    return np.frombuffer(column, np.uint8).astype(np.bool_)


def check_columns(sizes: dict[str, tuple[int, int]]) -> None:
    """Raises ValueError unless all columns have the same whole number of entries; `sizes` is (bytes, bytes per entry) by name."""
    counts = {size // width if size % width == 0 else -1 for size, width in sizes.values()}
    if len(counts) != 1 or -1 in counts:
        found = ", ".join(f"{name} {size} bytes of {width} each" for name, (size, width) in sizes.items())
        raise ValueError(f"columns of different lengths: {found}")

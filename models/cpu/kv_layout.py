"""Memory layout of paged KV: shapes of its element types, and the layout of an integer block. Imports no torch.

A float block holds only the elements of every head. In an integer block (int8, int16; head_dim D and block size S even)
each head holds its elements, then one float32 scale ("unit") per token:

    k [D / 2, S, 2 dims], units [S]      int16: 32767 is the L2 norm of the key, int8: 127 its amax
    v [S / 2, D, 2 tokens], units [S]    32767 or 127 is the token's amax

so its array has 4 / itemsize more entries than D. An element is off by half a unit at most. csrc/cpu/elementwise/ops.h
defines the same layout for C++.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Keyed by numpy or torch dtype name; numpy has no bfloat16 and keeps its bits as uint16.
LARGEST = {"int8": 127, "int16": 32767}
Shape = tuple[int, int, int, int]
_BF16_NAN = 0x7FC0


def unit_rows(dtype_name: str) -> int:
    """Array entries beyond head_dim that hold the units."""
    return {"int8": 4, "int16": 2}.get(dtype_name, 0)


def kv_shapes(num_blocks: int, heads: int, dim: int, block_size: int, dtype_name: str) -> tuple[Shape, Shape]:
    """Shapes of k and v."""
    rows = dim + unit_rows(dtype_name)
    return (num_blocks, heads, rows, block_size), (num_blocks, heads, block_size, rows)


def can_be_integers(dim: int, block_size: int) -> bool:
    """Whether int8 and int16 can hold keys and values of this shape."""
    return dim % 2 == 0 and block_size % 2 == 0


def fill_nan(array: NDArray[Any], blocks: list[int] | slice = slice(None)) -> None:
    """Fills the given blocks of k or v with NaN."""
    if array.dtype.name in LARGEST:
        array[blocks] = -1  # all-ones bits are a NaN as float32, and so is any element times such a unit
    else:
        array[blocks] = _BF16_NAN if array.dtype == np.uint16 else np.nan

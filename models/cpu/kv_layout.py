"""The memory of paged KV: codes and shapes of its element types, and what a block of integers looks like. Imports no torch.

Of floats a block holds the numbers of every head and nothing else. Of integers (int8, int16; head_dim D and block size S
even) each head of a block holds its numbers, then one float32 per token, the value of its 1:

    k [D / 2, S, 2 dims], units [S]      int16: 32767 is the length of the key, int8: 127 its largest element
    v [S / 2, D, 2 tokens], units [S]    32767 or 127 is the token's largest element

so its array has 4 / itemsize more rows than D. A number is off by half a unit at most. csrc/cpu/elementwise/ops.h says the
same to C++.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# By the name of the numpy or torch dtype; numpy has no bfloat16 and keeps its bits as uint16.
KV_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "uint16": 2, "int8": 3, "int16": 4}
LARGEST = {"int8": 127, "int16": 32767}
Shape = tuple[int, int, int, int]
_BF16_NAN = 0x7FC0


def unit_rows(dtype_name: str) -> int:
    """Rows of an array beyond head_dim: those that hold the units."""
    return {"int8": 4, "int16": 2}.get(dtype_name, 0)


def kv_shapes(num_blocks: int, heads: int, dim: int, block_size: int, dtype_name: str) -> tuple[Shape, Shape]:
    """Shapes of k and v."""
    rows = dim + unit_rows(dtype_name)
    return (num_blocks, heads, rows, block_size), (num_blocks, heads, block_size, rows)


def can_be_integers(dim: int, block_size: int) -> bool:
    """Whether int8 and int16 can hold keys and values of this shape."""
    return dim % 2 == 0 and block_size % 2 == 0


def fill_nan(array: NDArray[Any], blocks: list[int] | slice = slice(None)) -> None:
    """Makes every number in the blocks of k or v a NaN."""
    if array.dtype.name in LARGEST:
        array[blocks] = -1  # as float32 all ones are a NaN, and so is what is multiplied by such a unit
    else:
        array[blocks] = _BF16_NAN if array.dtype == np.uint16 else np.nan

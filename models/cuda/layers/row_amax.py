"""Largest magnitudes of rows, noted by the kernel that makes the rows for the one that rounds them next. Kept by
models/cuda/decoder.

A rounding that need not look for them takes blocks side by side, none of which waits for another: 1.3 us less for 8 rows of 14336.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch

_MOST_ROWS = 64  # more fill a device with a block for each


class RowAmax:
    """Room for `count` of them in a step."""

    __slots__ = ("_all",)

    def __init__(self, count: int) -> None:
        self._all = torch.zeros(count, _MOST_ROWS, device="cuda")

    def cleared(self, num_rows: int) -> Iterator[torch.Tensor | None]:
        """For each in turn zeros [num_rows], float32; None, without end, where rows are many."""
        if num_rows > _MOST_ROWS:
            return repeat(None)
        return iter(self._all.zero_()[:, :num_rows])

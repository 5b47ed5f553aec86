"""Per-token amax, computed in the producer kernel's epilogue for the quantizer. Used by models/cuda/decoder.

With the amax known, quantization needs no reduction and runs on independent CTAs: 1.3 us less for 8 tokens of 14336.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import torch

_MOST_ROWS = 64  # more tokens fill a GPU with one CTA each


class RowAmax:
    """Buffers for `count` amax vectors per step."""

    __slots__ = ("_all",)

    def __init__(self, count: int) -> None:
        self._all = torch.zeros(count, _MOST_ROWS, device="cuda")

    def cleared(self, num_rows: int) -> Iterator[torch.Tensor | None]:
        """Iterator over zeroed float32 [num_rows], one per vector; endless None above _MOST_ROWS tokens."""
        if num_rows > _MOST_ROWS:
            return repeat(None)
        return iter(self._all.zero_()[:, :num_rows])

"""Sequence parallelism: which tokens of a step's hidden states a rank of a GPU stage keeps, all of them or its own part.

Used by models/cuda/decoder.py. A part is reduce-scattered to its rank and all-gathered after the norm: the bytes of one
all-reduce, while norms and residuals cover T / tp tokens, and float8 inputs are gathered as float8.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trireme.models.forward import Group

SPLIT_FROM = 1024  # tokens; smaller steps all-reduce, and no CUDA graph has as many


class RowGroup(Protocol):
    """Collectives needed beyond models.forward.Group. x is contiguous; its tokens split into `size` equal parts."""

    rank: int
    size: int

    def reduce_rows(self, x: Tensor) -> Tensor:
        """Reduce-scatter in place: returns the sum over ranks of this rank's part of x; the other parts become undefined."""
        ...

    def gather_rows(self, x: Tensor) -> Tensor:
        """All-gather in place: fills x from each rank's own part."""
        ...


class WholeRows:
    """Every rank keeps all tokens."""

    def __init__(self, num: int, group: Group) -> None:
        self.num = self.total = num
        self._group = group

    def own(self, x: Tensor) -> Tensor:
        """The tokens of x that this rank keeps."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """Those tokens of the sum over ranks, in x."""
        return x if self._group.size == 1 else self._group.all_reduce(x)

    def whole(self, x: Tensor) -> Tensor:
        """All tokens, gathered from each rank's own."""
        return x


class SplitRows:
    """Each rank keeps an equal part. Buffers are padded from `num` to `total` tokens; the padding is never read."""

    def __init__(self, num: int, group: RowGroup) -> None:
        self.num = num
        self._group = group
        part = -(-num // group.size)
        self.total = part * group.size
        self._start, self._stop = part * group.rank, part * (group.rank + 1)

    def own(self, x: Tensor) -> Tensor:
        return x[self._start : self._stop]

    def summed(self, x: Tensor) -> Tensor:
        return self._group.reduce_rows(x)

    def whole(self, x: Tensor) -> Tensor:
        return self._group.gather_rows(x)[: self.num]


Rows = WholeRows | SplitRows

"""Which rows of a step's hidden states a rank of a GPU stage keeps: all of them, or with sequence parallelism its own part.

Used by models/cuda/decoder.py. A part is summed where it is kept (reduce-scatter) and made whole again once it is normed
(all-gather): the bytes of an all-reduce, while norms and residuals are of T / tp rows, and float8 inputs travel as they are.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trireme.models.forward import Group

SPLIT_FROM = 1024  # tokens; fewer are summed at once, and no graph has as many


class RowGroup(Protocol):
    """What is needed of a group beyond models.forward.Group. x is contiguous and its rows fall into `size` equal parts."""

    rank: int
    size: int

    def reduce_rows(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part of x, in its place there; the other parts are spoilt."""
        ...

    def gather_rows(self, x: Tensor) -> Tensor:
        """Fills x, of which each rank has its own part."""
        ...


class WholeRows:
    """Every rank keeps all rows."""

    def __init__(self, num: int, group: Group) -> None:
        self.num = self.total = num
        self._group = group

    def own(self, x: Tensor) -> Tensor:
        """The rows of x that are kept here."""
        return x

    def summed(self, x: Tensor) -> Tensor:
        """Those rows of the sum over ranks, in x."""
        return x if self._group.size == 1 else self._group.all_reduce(x)

    def whole(self, x: Tensor) -> Tensor:
        """All rows, where each rank has its own."""
        return x


class SplitRows:
    """Each rank keeps a part. Buffers have `total` rows, those beyond `num` so that the parts are equal; nobody reads them."""

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

"""A linear layer on tensors, over the packed weights of models/cpu/packed_linear. Built and called by the torch bodies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.models.cpu.packed_linear import PackedLinear
from trireme.models.cpu.packed_ops import PackedWeight, linear


class _Piece(NamedTuple):
    start: int
    stop: int
    weight: PackedWeight
    bias: Tensor | None


class Linear:
    """y = x W^T + b for x [T, k] float32. `n` output columns; immutable after construction."""

    __slots__ = ("_pieces", "_single", "k", "n", "nbytes", "packed")

    def __init__(self, packed: PackedLinear) -> None:
        self.packed = packed
        self.k, self.n, self.nbytes = packed.k, packed.n, packed.nbytes
        self._pieces = [
            _Piece(start, stop, weight, None if bias is None else torch.from_numpy(bias))
            for start, stop, weight, bias in packed.pieces
        ]
        self._single = self._pieces[0] if len(self._pieces) == 1 else None

    @property
    def weights(self) -> list[PackedWeight]:
        """The packed matrices, in order of their output columns."""
        return self.packed.weights

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes x W^T + b into `out` [T, n] and returns it."""
        if self._single is not None:
            return linear(x, self._single.weight, bias=self._single.bias, out=out)
        for start, stop, weight, bias in self._pieces:
            linear(x, weight, bias=bias, out=out[:, start:stop])
        return out

"""A linear layer over packed weights: one product, or several side by side that share their input.

Built by models/arch from raw matrices. Matrices of one kind are joined into one product (q, k, v; gate, up); files that
mix kinds keep one product per kind, written into slices of one output.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.quant.base import Bytes, PackedWeight, linear, pack
from models.weights import RawMatrix


class _Piece(NamedTuple):
    start: int
    stop: int
    weight: PackedWeight
    bias: Tensor | None


class Linear:
    """y = x W^T + b for x [T, k] float32. `n` output columns; immutable after construction."""

    __slots__ = ("_bias", "_pieces", "_single", "k", "n", "nbytes")

    def __init__(self, matrices: list[RawMatrix], biases: list[Tensor] | None = None) -> None:
        """Packs and joins `matrices`, one under the other; `biases` (float32) likewise, none or one for each."""
        self.k = matrices[0].k
        self.n = sum(matrix.n for matrix in matrices)
        bias = torch.cat(biases).contiguous() if biases else None
        self._pieces: list[_Piece] = []
        start = 0
        for kind, run in itertools.groupby(matrices, key=lambda matrix: matrix.kind):
            weight = _pack_run(kind, list(run), self.k)
            stop = start + weight.n
            part = None if bias is None else bias[start:stop]
            self._pieces.append(_Piece(start, stop, weight, part))
            start = stop
        self._single = self._pieces[0].weight if len(self._pieces) == 1 else None
        self._bias = bias
        self.nbytes = sum(piece.weight.nbytes for piece in self._pieces)

    def native_pieces(self) -> list[tuple[Any, int]]:
        """(native weight, address of its bias or 0) side by side, for the fused stage. Valid while this object lives."""
        return [(piece.weight.native, 0 if piece.bias is None else piece.bias.data_ptr()) for piece in self._pieces]

    @property
    def weights(self) -> list[PackedWeight]:
        """The packed matrices, in order of their output columns."""
        return [piece.weight for piece in self._pieces]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes x W^T + b into `out` [T, n] and returns it."""
        if self._single is not None:
            return linear(x, self._single, bias=self._bias, out=out)
        for start, stop, weight, bias in self._pieces:
            linear(x, weight, bias=bias, out=out[:, start:stop])
        return out


def _pack_run(kind: str, run: list[RawMatrix], k: int) -> PackedWeight:
    rows: Bytes = run[0].raw if len(run) == 1 else np.concatenate([matrix.raw for matrix in run])
    return pack(kind, rows, sum(matrix.n for matrix in run), k)

"""The weights of a linear layer: one packed matrix, or several that share their input. No torch.

Built by the bodies from raw matrices; applied by the native stage, or by models/cpu/linear on tensors. Adjacent matrices of
one kind are fused into one GEMM (q, k, v; gate, up); files that mix kinds get one GEMM per kind, each writing a slice of
the output.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from trireme.models.native import load_native
from trireme.models.weights.packed import Bytes, Floats, PackedWeight, address_of, pack
from trireme.models.weights.sources import RawMatrix


class OutputSlice(NamedTuple):
    """A GEMM that writes the output columns [start, stop)."""

    start: int
    stop: int
    weight: PackedWeight
    bias: Floats | None


class PackedLinear:
    """W and b of y = x W^T + b. `n` output columns, `k` inputs; immutable after construction."""

    __slots__ = ("k", "n", "nbytes", "pieces")

    def __init__(self, matrices: list[RawMatrix], biases: list[Floats] | None = None) -> None:
        """Packs `matrices` [n_i, k] and fuses them along their outputs; `biases` [n_i] likewise, none or one for each."""
        self.k = matrices[0].k
        self.n = sum(matrix.n for matrix in matrices)
        bias = np.concatenate(biases) if biases else None
        self.pieces: list[OutputSlice] = []
        start = 0
        for kind, run in itertools.groupby(matrices, key=lambda matrix: matrix.kind):
            weight = _pack_run(kind, list(run), self.k)
            stop = start + weight.n
            self.pieces.append(OutputSlice(start, stop, weight, None if bias is None else bias[start:stop]))
            start = stop
        self.nbytes = sum(piece.weight.nbytes for piece in self.pieces)

    def native_pieces(self) -> list[tuple[Any, int]]:
        """(native weight, address of its bias or 0) of each slice, for the native stage. Valid while this object lives."""
        return [(piece.weight.native, 0 if piece.bias is None else address_of(piece.bias)) for piece in self.pieces]

    @property
    def weights(self) -> list[PackedWeight]:
        """The packed matrices, in order of their output columns."""
        return [piece.weight for piece in self.pieces]

    def multiply(self, x: Floats, out: Floats) -> None:
        """Writes x [T, k] W^T + b into `out` [T, n], both contiguous float32."""
        linear, rows = load_native().linear, x.shape[0]
        where, to = address_of(x), address_of(out)
        for (native, bias), piece in zip(self.native_pieces(), self.pieces, strict=True):
            linear(native, where, self.k, rows, to + 4 * piece.start, self.n, bias, False)


def _pack_run(kind: str, run: list[RawMatrix], k: int) -> PackedWeight:
    rows: Bytes = run[0].raw if len(run) == 1 else np.concatenate([matrix.raw for matrix in run])
    return pack(kind, rows, sum(matrix.n for matrix in run), k)

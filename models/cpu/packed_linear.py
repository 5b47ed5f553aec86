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
from trireme.models.weights.packed import Bytes, Floats, PackedWeight, pack
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

    def native_pieces(self) -> list[tuple[Any, Floats | None]]:
        """(native weight, its bias or None) of each slice, for the native stage. It keeps their addresses: valid while this object
        lives."""
        return [(piece.weight.native, piece.bias) for piece in self.pieces]

    @property
    def weights(self) -> list[PackedWeight]:
        """The packed matrices, in order of their output columns."""
        return [piece.weight for piece in self.pieces]

    def multiply(self, x: Floats, out: Floats) -> None:
        """Writes x [T, k] W^T + b into `out` [T, n], both float32."""
        linear = load_native().linear
        for start, stop, weight, bias in self.pieces:
            linear(weight.native, x, out[:, start:stop], bias, False)


def _pack_run(kind: str, run: list[RawMatrix], k: int) -> PackedWeight:
    rows: Bytes = run[0].raw if len(run) == 1 else np.concatenate([matrix.raw for matrix in run])
    return pack(kind, rows, sum(matrix.n for matrix in run), k)

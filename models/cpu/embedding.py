"""Token embedding, sharded over the vocabulary. Built by the torch bodies; shares its matrix with a tied output head."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cpu.packed_ops import PackedWeight, gather_rows
from trireme.models.forward import Group
from trireme.topology.mesh import Span


class Embedding:
    """Tokens [rows.start, rows.stop) of the vocabulary; embeddings held by other ranks arrive by all-reduce."""

    def __init__(self, weight: PackedWeight, rows: Span, group: Group) -> None:
        self._weight = weight
        self._rows = rows
        self._group = group
        self.nbytes = weight.nbytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        """Embeddings of token_ids [T] int32 into `out` [T, hidden] float32; the same on every rank."""
        if self._group.size == 1:
            return gather_rows(self._weight, token_ids, out)
        local = token_ids - self._rows.start
        elsewhere = (local < 0) | (local >= self._rows.size)
        gather_rows(self._weight, torch.where(elsewhere, 0, local), out)
        out[elsewhere] = 0.0
        return self._group.all_reduce(out)

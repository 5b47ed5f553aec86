"""Embedding, final norm and output head of one stage of a model on a GPU. Used by models/cuda/decoder.py.

Legend: T tokens, S tokens whose logits are wanted, H hidden, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layer_weights import Parts
from trireme.models.cuda.layers.linear import CudaLinear
from trireme.models.cuda.layers.norm import CudaNorm
from trireme.models.cuda.layers.protocol import LinearLayer
from trireme.models.cuda.sequence_parallel import Rows
from trireme.models.forward import Group
from trireme.topology.mesh import Mesh


class CudaEmbedHead:
    """Embedding on the first stage, `norm` and head on the last; tied, they share one matrix. Stages in between have none."""

    def __init__(self, parts: Parts, mesh: Mesh, group: Group) -> None:
        self._arch, self._shares = parts.arch, parts.shares
        self._dtype = parts.dtype
        self._mesh, self._group = mesh, group
        arch, rows, form = parts.arch, parts.shares.vocab.size, parts.form
        if mesh.is_last_stage:
            self.norm: CudaNorm = parts.norm("model.norm")
        self._positions: Tensor | None = None
        if mesh.is_first_stage and mesh.tp_rank == 0 and form.learned_positions:
            name = "model.embed_positions.weight"
            self._positions = parts.matrix(name, form.learned_positions, arch.hidden)
        if mesh.is_first_stage or arch.tie_embeddings:
            self._embedding = parts.matrix("model.embed_tokens.weight", rows, arch.hidden)
        if arch.tie_embeddings:
            self._head: LinearLayer = CudaLinear(self._embedding, None)
        elif arch.unit_head and mesh.is_last_stage:
            self._head = CudaLinear(parts.unit_matrix("lm_head.weight", rows, arch.hidden), None)
        elif mesh.is_last_stage:
            self._head = parts.linear("", [("lm_head", rows)], arch.hidden, bias=False)

    def begin(self, token_ids: Tensor, positions: Tensor, rows: Rows, residual: Tensor, spare: Tensor) -> None:
        """Fills `residual` with token embeddings (summed over vocabulary shards) or the previous stage's hidden states.
        Overwrites `spare`."""
        x = residual[: rows.num]
        if not self._mesh.is_first_stage:
            x.copy_(self._group.recv_prev(tuple(x.shape), x.dtype))
            return
        first = self._shares.vocab.start
        ops.gather_rows(self._embedding, token_ids, x, first=first, scale=self._arch.embed_scale)
        if self._positions is not None:
            x.add_(ops.gather_rows(self._positions, positions, spare[: rows.num]))
        rows.summed(residual)

    def logits(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Logits [S, V] of the tokens `index` of the normed x [T, H]; None: of all."""
        if index is not None:
            x = x.index_select(0, index)
            if not x.shape[0]:
                return x.new_empty(0, self._arch.vocab_size)
        sizes = self._shares.vocab_sizes
        own = torch.empty(x.shape[0], sizes[self._mesh.tp_rank], dtype=self._dtype, device="cuda")
        return self._finished(self._group.all_gather(self._head(x, own), sizes))

    def _finished(self, logits: Tensor) -> Tensor:
        arch = self._arch
        if arch.logit_scale != 1.0:
            logits.mul_(arch.logit_scale)
        if arch.logit_softcap:
            logits.div_(arch.logit_softcap).tanh_().mul_(arch.logit_softcap)
        return logits

"""From the worker's host arrays to one step on the GPU, and back: the GPU model as models.forward.Model.

Rows with one token go first: decode attention takes them, flash attention the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.arch.cuda import CudaBatch, CudaModel, Prompts
from models.cuda_ops import PagedKV
from models.forward import HostBatch, Logits

Ints = NDArray[np.int32]


def order_of(batch: HostBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """(rows, tokens, number of decodes): how rows and their tokens are ordered on the GPU, as indices into the batch's."""
    counts = np.diff(batch.query_start)
    is_decode = counts == 1
    rows = np.concatenate((np.flatnonzero(is_decode), np.flatnonzero(~is_decode)))
    starts = batch.query_start[:-1][rows].astype(np.int64)
    sizes = counts[rows]
    ends = np.cumsum(sizes)
    tokens = np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)
    return rows, tokens, int(is_decode.sum())


def upload(batch: HostBatch, block_size: int, *, splits: int = 1, device: str = "cuda") -> CudaBatch:
    """The batch on the device."""

    def sent(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    rows, tokens, decodes = order_of(batch)
    place = np.empty_like(tokens)
    place[tokens] = np.arange(tokens.size)
    index = place[batch.logits_index]
    is_all = index.size == tokens.size and bool((index == np.arange(index.size)).all())
    return CudaBatch(
        token_ids=sent(batch.token_ids[tokens]),
        positions=sent(batch.positions[tokens]),
        slots=sent(batch.slots[tokens]),
        context_len=sent(batch.context_len[rows]),
        block_table=sent(batch.block_table[rows]),
        logits_index=None if is_all else sent(index),
        num_decodes=decodes,
        splits=splits,
        prompts=_prompts(batch, rows[decodes:], block_size, sent) if decodes < rows.size else None,
    )


def _prompts(
    batch: HostBatch, rows: NDArray[np.int64], block_size: int, sent: Callable[[NDArray[Any]], Tensor]
) -> Prompts:
    queries, contexts = np.diff(batch.query_start)[rows], batch.context_len[rows]
    slots = []
    for row, context in zip(rows.tolist(), contexts.tolist(), strict=True):
        block, offset = np.divmod(np.arange(context, dtype=np.int64), block_size)
        slots.append(batch.block_table[row, block].astype(np.int64) * block_size + offset)
    return Prompts(
        query_start=sent(_from_zero(queries)),
        context_start=sent(_from_zero(contexts)),
        context_slots=sent(np.concatenate(slots)),
        longest_query=int(queries.max()),
        longest_context=int(contexts.max()),
    )


def _from_zero(sizes: Ints) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


class HostModel:
    """A CudaModel that takes host arrays and gives logits on the host. Waits for every step."""

    def __init__(self, model: CudaModel, device: str = "cuda") -> None:
        self.model, self._device = model, device
        self.vocab_size = model.vocab_size
        self.num_kv_layers, self.kv_heads, self.head_dim = model.num_kv_layers, model.kv_heads, model.head_dim

    def forward(self, batch: HostBatch, kv: list[PagedKV]) -> Logits | None:
        """Logits [S, V] float32, None on a stage that is not the last."""
        with torch.inference_mode():
            block_size = kv[0].k.shape[2]
            logits = self.model.run(upload(batch, block_size, device=self._device), kv)
            if not self.model.mesh.is_last_stage:
                return None
            found: Logits = logits.float().cpu().numpy()
        return found

"""Adapts the GPU model to models.forward.Model: uploads a step's host arrays and downloads its logits.

Sequences with one token come first, for decode attention; the others follow in the order of the prompt plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.models.arch.rope import POSITIONS, TableRows
from trireme.models.cuda.attention.prefill import Prompts
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules, order_prompts, plan_prompts
from trireme.models.cuda.decoder import CudaBatch, CudaModel
from trireme.models.cuda.ops import CudaPagedKV
from trireme.models.forward import HostBatch, Logits


class Order(NamedTuple):
    """Order of sequences and tokens on the GPU, as indices into the batch. The first `decodes` sequences have one token each."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    decodes: int


def order_of(batch: HostBatch) -> Order:
    """Decodes first, then prompts in the order of order_prompts."""
    counts = np.diff(batch.query_start)
    is_decode = counts == 1
    rows = np.flatnonzero(~is_decode)
    computed = batch.context_len[rows] - counts[rows]
    rows = np.concatenate((np.flatnonzero(is_decode), rows[order_prompts(counts[rows], computed)]))
    starts = batch.query_start[:-1][rows].astype(np.int64)
    sizes = counts[rows]
    ends = np.cumsum(sizes)
    tokens = np.arange(int(ends[-1])) + np.repeat(starts - (ends - sizes), sizes)
    return Order(rows, tokens, int(is_decode.sum()))


def upload(
    batch: HostBatch,
    *,
    rules: Rules = PIECES,
    splits: int = 1,
    device: str = "cuda",
    table_rows: TableRows = POSITIONS,
) -> CudaBatch:
    """The batch on the device, reordered by order_of; copies are asynchronous on the current stream."""

    def sent(array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    rows, tokens, decodes = order_of(batch)
    place = np.empty_like(tokens)
    place[tokens] = np.arange(tokens.size)
    index = place[batch.logits_index]
    is_all = index.size == tokens.size and bool((index == np.arange(index.size)).all())
    table, contexts = sent(batch.block_table[rows]), batch.context_len[rows]
    prompts = None
    if decodes < rows.size:
        counts = np.diff(batch.query_start)[rows[decodes:]]
        plan = plan_prompts(counts, contexts[decodes:] - counts, rules)
        piece_row, *others = plan.columns
        prompts = Prompts.of(plan, table, map(sent, (decodes + piece_row, *others)))
    owner = np.repeat(rows, np.diff(batch.query_start)[rows])
    return CudaBatch(
        token_ids=sent(batch.token_ids[tokens]),
        positions=sent(table_rows.of(batch.positions[tokens], owner, batch.num_prompt)),
        slots=sent(batch.slots[tokens]),
        context_len=sent(contexts),
        block_table=table,
        logits_index=None if is_all else sent(index),
        num_decodes=decodes,
        splits=splits,
        prompts=prompts,
    )


class HostModel:
    """A CudaModel that takes host arrays and returns logits on the host. Synchronizes on every step."""

    def __init__(self, model: CudaModel, device: str = "cuda") -> None:
        self.model, self._device = model, device
        self.vocab_size = model.vocab_size
        self.num_kv_layers, self.kv_heads, self.head_dim = model.num_kv_layers, model.kv_heads, model.head_dim

    def forward(self, batch: HostBatch, kv: list[CudaPagedKV]) -> Logits | None:
        """Logits [S, V] float32 on the last stage, None elsewhere."""
        with torch.inference_mode():
            model = self.model
            rules, table_rows = model.prompt_attention.rules, model.table_rows
            logits = model.run(upload(batch, rules=rules, device=self._device, table_rows=table_rows), kv)
            if not self.model.mesh.is_last_stage:
                return None
            found: Logits = logits.float().cpu().numpy()
        return found

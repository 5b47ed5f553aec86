"""What a model's forward sees: the flat token batch, the paged KV tensors and the group of ranks it computes with.

Legend: T tokens of the step, R scheduled rows, S positions whose logits are wanted, B longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """One step's flat inputs. Rows are contiguous in T: row r owns tokens query_start[r]:query_start[r+1].

    context_len[r] counts all tokens of row r including this step's. KV of token t is written to
    (slot[t] // block_size, slot[t] % block_size) before attention reads it back through block_table.
    """

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    slots: Tensor  # [T] int32, block_id * block_size + offset
    query_start: Tensor  # [R + 1] int32
    context_len: Tensor  # [R] int32
    block_table: Tensor  # [R, B] int32
    logits_index: Tensor  # [S] int32, rising indices into T
    choices: Tensor  # [R] int32, choice number of each row (test models look at it)
    num_prompt: Tensor  # [R] int32, prompt length of each row


@dataclass(slots=True)
class KVLayer:
    """Paged KV of one layer on one rank. Keys are stored transposed inside a block, so that a vector lane is a token.

    k: [num_blocks, kv_heads, head_dim, block_size]   v: [num_blocks, kv_heads, block_size, head_dim]
    dtype float32, float16 or bfloat16.
    """

    k: Tensor
    v: Tensor


class Group(Protocol):
    """Ranks that compute one stage together (TP) and its neighbours (PP). Single-rank implementation: SoloGroup."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; every rank gets bit-identical results."""
        ...

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate along the last dim; rank i contributes sizes[i] columns."""
        ...

    def send_next(self, x: Tensor) -> None:
        """Pass hidden states to the same tp rank of the next stage."""
        ...

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive hidden states from the previous stage."""
        ...


class SoloGroup:
    """The group of a worker that is alone."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def send_next(self, x: Tensor) -> None:
        raise AssertionError("a single stage has no next stage")

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise AssertionError("a single stage has no previous stage")


class Model(Protocol):
    """One stage of a model on one rank. Built by models.load.load_model."""

    vocab_size: int
    num_kv_layers: int  # layers of this stage
    kv_heads: int  # KV heads of this rank
    head_dim: int

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Runs this stage: receives hidden states unless first, sends them unless last. Returns logits [S, vocab] float32
        on every rank of the last stage (gathered over TP), None on other stages."""
        ...

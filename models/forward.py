"""Inputs of a model's forward: the flat token batch, the paged KV memory and the group of ranks.

The worker and the native stages pass numpy arrays (HostBatch, HostKV); torch bodies see the same memory as tensors
(ForwardBatch, KVLayer; models/cpu/tensors.py converts). Imports no torch.

Legend: T tokens of the step, R scheduled sequences, S positions whose logits are wanted, B longest block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Array = TypeVar("Array")


@dataclass(slots=True)
class StepBatch(Generic[Array]):
    """One step's flat inputs. Sequences are contiguous in T: sequence r owns tokens query_start[r]:query_start[r+1].

    context_len[r] counts all tokens of sequence r including this step's. KV of token t is written to
    (slot[t] // block_size, slot[t] % block_size) before attention reads it back through block_table.
    """

    token_ids: Array  # [T] int32
    positions: Array  # [T] int32
    slots: Array  # [T] int32, block_id * block_size + offset
    query_start: Array  # [R + 1] int32
    context_len: Array  # [R] int32
    block_table: Array  # [R, B] int32
    logits_index: Array  # [S] int32, rising indices into T
    choices: Array  # [R] int32, choice number of each sequence (read by test models only)
    num_prompt: Array  # [R] int32, prompt length of each sequence


@dataclass(slots=True)
class PagedKV(Generic[Array]):
    """Paged KV of one layer on one rank. Keys are stored transposed inside a block, so that each SIMD lane holds one token.

    k: [num_blocks, kv_heads, head_dim, block_size]   v: [num_blocks, kv_heads, block_size, head_dim]
    dtype float32, float16 or bfloat16 (in numpy: its bits as uint16); models/cpu/kv_layout.py defines int8 and int16.
    """

    k: Array
    v: Array


HostBatch = StepBatch[NDArray[np.int32]]
HostKV = PagedKV[NDArray[Any]]
ForwardBatch = StepBatch["Tensor"]
KVLayer = PagedKV["Tensor"]
Logits = NDArray[np.float32]


class Group(Protocol):
    """Tensor-parallel ranks of one stage and its pipeline neighbours. Single-rank implementation: SoloGroup."""

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


class ExpertGroup(Protocol):
    """Expert-parallel engines: each holds some experts of every layer; all run the same layers in every step."""

    rank: int
    size: int

    def spread(self, x: Tensor) -> Tensor:
        """All-gather: this engine's tokens [T, H] to those of all engines in rank order, padded to the agreed counts."""
        ...

    def collect(self, x: Tensor, count: int) -> Tensor:
        """Reduce-scatter: the first `count` of this engine's tokens, each summed over the partial results of all engines."""
        ...

    def own(self, x: Tensor, count: int) -> Tensor:
        """The first `count` of this engine's tokens out of a gathered tensor, without a sum."""
        ...


class SoloGroup:
    """Group of a single-rank worker."""

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


class KVShape(Protocol):
    """KV cache dimensions of one stage of a model on one rank."""

    num_kv_layers: int  # layers of this stage
    kv_heads: int  # KV heads of this rank
    head_dim: int


class Model(KVShape, Protocol):
    """One stage of a model on one rank, run by the worker. Built by models.load.load_model."""

    vocab_size: int

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits | None:
        """Runs this stage: receives hidden states unless first, sends them unless last. Returns logits [S, vocab] float32
        on every rank of the last stage (gathered over TP), None on other stages. The worker passes the same `kv` list in
        every step."""
        ...


class TensorModel(KVShape, Protocol):
    """Torch counterpart of Model; models.cpu.tensors.OverTensors adapts it to Model."""

    vocab_size: int

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None: ...

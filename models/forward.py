"""What a model's forward sees: the flat token batch, the paged KV memory and the group of ranks it computes with.

The worker and the native stages speak in numpy arrays (HostBatch, HostKV); bodies in torch see the same memory as tensors
(ForwardBatch, KVLayer; models/cpu/tensors.py is the border). Imports no torch.

Legend: T tokens of the step, R scheduled rows, S positions whose logits are wanted, B longest block table.
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
    """One step's flat inputs. Rows are contiguous in T: row r owns tokens query_start[r]:query_start[r+1].

    context_len[r] counts all tokens of row r including this step's. KV of token t is written to
    (slot[t] // block_size, slot[t] % block_size) before attention reads it back through block_table.
    """

    token_ids: Array  # [T] int32
    positions: Array  # [T] int32
    slots: Array  # [T] int32, block_id * block_size + offset
    query_start: Array  # [R + 1] int32
    context_len: Array  # [R] int32
    block_table: Array  # [R, B] int32
    logits_index: Array  # [S] int32, rising indices into T
    choices: Array  # [R] int32, choice number of each row (test models look at it)
    num_prompt: Array  # [R] int32, prompt length of each row


@dataclass(slots=True)
class PagedKV(Generic[Array]):
    """Paged KV of one layer on one rank. Keys are stored transposed inside a block, so that a vector lane is a token.

    k: [num_blocks, kv_heads, head_dim, block_size]   v: [num_blocks, kv_heads, block_size, head_dim]
    dtype float32, float16 or bfloat16 (in numpy: its bits as uint16); int8 and int16 as models/cpu/kv_layout.py says.
    """

    k: Array
    v: Array


HostBatch = StepBatch[NDArray[np.int32]]
HostKV = PagedKV[NDArray[Any]]
ForwardBatch = StepBatch["Tensor"]
KVLayer = PagedKV["Tensor"]
Logits = NDArray[np.float32]


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


class ExpertGroup(Protocol):
    """Engines that have some experts of each layer each. All run the same layers in every step."""

    rank: int
    size: int

    def spread(self, x: Tensor) -> Tensor:
        """The rows of all engines, by rank, from this one's [T, H]: as many of each as all have agreed on."""
        ...

    def collect(self, x: Tensor, count: int) -> Tensor:
        """The first `count` of this engine's rows, each summed over all engines, from what each has computed for all rows."""
        ...

    def own(self, x: Tensor, count: int) -> Tensor:
        """The first `count` of this engine's rows as they are."""
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


class KVShape(Protocol):
    """What the KV memory of one stage of a model on one rank must fit."""

    num_kv_layers: int  # layers of this stage
    kv_heads: int  # KV heads of this rank
    head_dim: int


class Model(KVShape, Protocol):
    """One stage of a model on one rank, as the worker runs it. Built by models.load.load_model."""

    vocab_size: int

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits | None:
        """Runs this stage: receives hidden states unless first, sends them unless last. Returns logits [S, vocab] float32
        on every rank of the last stage (gathered over TP), None on other stages. The worker passes the same `kv` list in
        every step."""
        ...


class TensorModel(KVShape, Protocol):
    """The same in torch; models.cpu.tensors.OverTensors makes a Model of it."""

    vocab_size: int

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None: ...

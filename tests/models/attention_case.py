"""Builds paged batches for the attention tests: rows with a history already in the cache and new tokens on top."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trireme.models.cpu.kv_blocks import write_tokens
from trireme.models.cpu.kv_layout import kv_shapes
from trireme.models.forward import ForwardBatch, KVLayer


@dataclass
class Shape:
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    block_size: int = 16


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(rows: list[tuple[int, int]], block_size: int, *, spare_blocks: int = 3, seed: int = 0) -> ForwardBatch:
    """rows: (context including new tokens, new tokens). Blocks are dealt in a random order; unused entries are -1."""
    needed = [(context + block_size - 1) // block_size for context, _ in rows]
    total = sum(needed) + spare_blocks
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.full((len(rows), max(needed) + 1), -1, dtype=torch.int32)
    positions, slots, starts = [], [], [0]
    for row, (context, new) in enumerate(rows):
        blocks = [order.pop() for _ in range(needed[row])]
        table[row, : len(blocks)] = int32(blocks)
        for position in range(context - new, context):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
        starts.append(starts[-1] + new)
    return ForwardBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int32),
        positions=int32(positions),
        slots=int32(slots),
        query_start=int32(starts),
        context_len=int32([context for context, _ in rows]),
        block_table=table,
        logits_index=int32([stop - 1 for stop in starts[1:]]),
        choices=torch.zeros(len(rows), dtype=torch.int32),
        num_prompt=int32([context for context, _ in rows]),
    )


def empty_kv(num_blocks: int, heads: int, dim: int, block_size: int, dtype: torch.dtype) -> KVLayer:
    """A cache full of NaN."""
    nan = -1 if dtype in (torch.int8, torch.int16) else float("nan")
    k, v = kv_shapes(num_blocks, heads, dim, block_size, str(dtype).removeprefix("torch."))
    return KVLayer(torch.full(k, nan, dtype=dtype), torch.full(v, nan, dtype=dtype))


def make_kv(batch: ForwardBatch, shape: Shape, dtype: torch.dtype, *, seed: int = 1) -> KVLayer:
    """A cache with random contents in every block that the batch names, NaN in all others and beyond each row's end."""
    generator = torch.Generator().manual_seed(seed)
    kv = empty_kv(int(batch.block_table.max()) + 4, shape.kv_heads, shape.dim, shape.block_size, dtype)
    for row, context in enumerate(batch.context_len.tolist()):
        position = torch.arange(context)
        slots = batch.block_table[row, position // shape.block_size].long() * shape.block_size
        k = torch.randn(context, shape.kv_heads, shape.dim, generator=generator)
        v = torch.randn(context, shape.kv_heads, shape.dim, generator=generator)
        write_tokens(kv, slots + position % shape.block_size, k, v)
    return kv

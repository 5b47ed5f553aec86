"""Torch ops of the bodies models/cpu/{gpt,moe}.py: layer norm, GELU, the clamped gate, attention with sinks.

Like models/cpu/ops.py it knows no weights. `<op>_reference` spells out what a fused torch op computes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trireme.models.cpu.kv_blocks import read_blocks
from trireme.models.forward import ForwardBatch, KVLayer

_functional = torch.nn.functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim of x [T, H]."""
    return _functional.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.double()
    return (normed if bias is None else normed + bias.double()).to(x.dtype)


def gelu(x: Tensor, *, tanh: bool = False) -> Tensor:
    """x times the standard normal CDF of x; `tanh` uses GPT-2's approximation (gelu_new)."""
    return _functional.gelu(x, approximate="tanh" if tanh else "none")


def gelu_reference(x: Tensor, *, tanh: bool = False) -> Tensor:
    """gelu spelled out in float64; returns x's dtype."""
    wide = x.double()
    if tanh:
        share = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
    else:
        share = torch.erf(wide / math.sqrt(2))
    return (0.5 * wide * (1 + share)).to(x.dtype)


def clamped_swiglu(gate_up: Tensor, limit: float, alpha: float) -> Tensor:
    """GPT-OSS's gate: (up + 1) * gate * sigmoid(alpha * gate), gate clamped to at most `limit`, up to +-`limit`.
    gate_up [T, 2 F]: F gate columns, then F up columns. Returns [T, F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    # in float64: torch's vectorized and scalar loops differ in the last bit, and T and F decide which one runs
    share = torch.sigmoid((alpha * gate).double()).to(gate.dtype)
    return (up.clamp(-limit, limit) + 1) * (gate * share)


def torch_attention(
    q: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    scale: float,
    *,
    window: int | None = None,
    chunk: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """ops.paged_attention plus what the kernel lacks: `sinks` [Hq] add one score per head to the softmax denominator,
    without a value; with `chunk` a query attends only within its own chunk of positions.

    q [T, Hq, D], rotated. Returns [T, Hq * D]. Computed query by query: the shape of a GEMM decides its summation order, so
    only then does a result depend neither on other sequences nor on how a prompt is chunked.
    """
    tokens, heads, dim = q.shape
    result = torch.empty(tokens, heads, dim, dtype=q.dtype)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    for row, context in enumerate(contexts):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        first_query = context - (stop - start)
        origin = _first_seen(first_query, window, chunk)
        keys, values = _gather_row(kv, batch.block_table[row], origin, context)
        for token, position in enumerate(range(first_query, context), start):
            seen = slice(_first_seen(position, window, chunk) - origin, position + 1 - origin)
            result[token] = _attend(q[token], keys[:, seen], values[:, seen], scale, sinks)
    return result.view(tokens, heads * dim)


def _first_seen(position: int, window: int | None, chunk: int) -> int:
    """First position that the query at `position` may attend to; non-decreasing in it."""
    first = max(0, position - window + 1) if window else 0
    return max(first, position // chunk * chunk) if chunk else first


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """One query [Hq, D] over keys and values [Hk, S, D]. Copied so that every GEMM starts at an aligned address."""
    groups = keys.shape[0]
    queries = q.float().view(groups, -1, q.shape[-1])
    scores = torch.bmm(queries.contiguous(), keys.contiguous().transpose(1, 2)) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(groups, -1, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]].contiguous()
    return torch.bmm(weights, values.contiguous()).view(q.shape).to(q.dtype)


def _gather_row(kv: KVLayer, table: Tensor, first: int, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values [Hk, context - first, D] of the tokens first..context of one sequence, as float32."""
    block_size = kv.k.shape[3]
    skipped = first // block_size
    blocks = table[skipped : (context + block_size - 1) // block_size].long()
    inside = slice(first - skipped * block_size, context - skipped * block_size)
    keys, values = read_blocks(kv, blocks)
    return keys[:, inside], values[:, inside]


def rows_by_chunk(batch: ForwardBatch, chunk: int, block_size: int) -> ForwardBatch:
    """Splits every sequence of the batch at multiples of `chunk` positions, so that plain causal attention over the result
    is chunked attention. `chunk` is a multiple of block_size.

        positions   0 . . . chunk . . . 2 chunk . . context      a sequence of the step computes the positions marked =
                              ==========|==========              two sequences here, with tables that begin at their chunk
    """
    contexts = batch.context_len.tolist()
    if max(contexts, default=0) <= chunk:
        return batch
    starts = batch.query_start.tolist()
    edges, lengths, tables = [0], [], []
    for row, context in enumerate(contexts):
        position = context - (starts[row + 1] - starts[row])
        while position < context:
            begin = position // chunk * chunk
            end = min(begin + chunk, context)
            edges.append(edges[-1] + end - position)
            lengths.append(end - begin)
            tables.append(batch.block_table[row, begin // block_size : -(-end // block_size)])
            position = end
    return ForwardBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        slots=batch.slots,
        query_start=torch.tensor(edges, dtype=torch.int32),
        context_len=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
        logits_index=batch.logits_index,
        choices=batch.choices,
        num_prompt=batch.num_prompt,
    )

"""Causal attention of query runs over the paged cache as a Triton kernel: any lengths, windows, soft caps, sinks, fp8.

Imported by models.cuda.attention.registry if Triton is installed. It reads keys and values in the paged cache without
gathering, and its launch depends on sizes only, so it can be captured in a CUDA graph.

Legend: T tokens, P pieces, Hq query heads, Hk KV heads, D head dim. Tiles and online softmax as in Dao 2023.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,untyped-decorator,misc,operator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from trireme.models.cuda.ops import CudaPagedKV

LOG2E = 1.4426950408889634


class Tile(NamedTuple):
    """Tile of queries and keys of a program, and its compile options."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _piece_of(bounds, num_pieces, tile, QUERIES: tl.constexpr):
    """The piece of a tile: piece p owns the tiles from bounds[p] // QUERIES + p on."""
    low, high = 0, num_pieces
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(bounds + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k_base,
    v_base,
    blocks,
    first,
    last,
    positions,
    scale,
    softcap,
    block_stride,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
):
    dims = tl.arange(0, DIM)
    for start in range(first, last, KEYS):
        at = start + tl.arange(0, KEYS)
        if IS_MASKED:
            is_key = at < last
            block = tl.load(blocks + at // BLOCK, mask=is_key, other=0).to(tl.int64)
        else:
            block = tl.load(blocks + at // BLOCK).to(tl.int64)
        offset = block * block_stride + (at % BLOCK) * DIM
        k = tl.load(k_base + offset[None, :] + dims[:, None])
        scores = tl.dot(q, k.to(q.dtype)) * scale
        if HAS_SOFTCAP:
            x = scores / softcap
            scores = softcap * (1 - 2 / (tl.exp2(x * 2.8853900817779268) + 1))
            scores *= 1.4426950408889634
        if IS_MASKED:
            seen = at[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (at[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))  # also masks keys from `last` on: no query is there
        new_top = tl.maximum(top, tl.max(scores, 1))
        if IS_MASKED:
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        else:
            anchor = new_top
        weights = tl.exp2(scores - anchor[:, None])
        keep = tl.exp2(top - anchor)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None]
        if IS_MASKED:
            v = tl.load(v_base + offset[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
        else:
            v = tl.load(v_base + offset[:, None] + dims[None, :])
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
        top = new_top
    return acc, top, total


# Sizes and addresses that change between steps must not trigger recompilation.
@triton.jit(
    do_not_specialize=["num_pieces", "table_stride"],
    do_not_specialize_on_alignment=["table", "places", "firsts", "bounds", "contexts"],
)
def _piece_kernel(
    q_base, out_base, k_base, v_base,
    table, places, firsts, bounds, contexts, sinks, num_pieces,
    q_stride, out_stride, table_stride, block_stride, scale, softcap, v_scale,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # last tiles have the longest context: start them first
    head = tl.program_id(0)
    piece = _piece_of(bounds, num_pieces, tile, QUERIES)
    begin = tl.load(bounds + piece)
    count = tl.load(bounds + piece + 1) - begin
    first = (tile - (begin // QUERIES + piece)) * QUERIES
    if first >= count:
        return
    context = tl.load(contexts + piece)
    blocks = table + tl.load(places + piece).to(tl.int64) * table_stride
    lines, dims = tl.arange(0, QUERIES), tl.arange(0, DIM)
    base = context - count + first  # position of the tile's first query
    positions = base + lines
    is_query = first + lines < count
    tokens = (tl.load(firsts + piece) + first + lines).to(tl.int64)
    q = tl.load(q_base + tokens[:, None] * q_stride + head * DIM + dims[None, :], mask=is_query[:, None], other=0.0)
    kv_head = head // GROUP
    k_head = k_base + kv_head.to(tl.int64) * (BLOCK * DIM)
    v_head = v_base + kv_head.to(tl.int64) * (BLOCK * DIM)
    acc = tl.zeros([QUERIES, DIM], tl.float32)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    stop = tl.minimum(context, base + QUERIES)  # no query sees keys beyond
    whole = (base + 1) // KEYS * KEYS  # up to here every query sees every key, except with a window
    low = 0
    if WINDOW:
        low = tl.maximum(base - WINDOW + 1, 0) // KEYS * KEYS
        whole = low
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, blocks, low, whole, positions, scale, softcap, block_stride,
        WINDOW, HAS_SOFTCAP, False, KEYS, BLOCK, DIM,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_head, v_head, blocks, whole, stop, positions, scale, softcap, block_stride,
        WINDOW, HAS_SOFTCAP, True, KEYS, BLOCK, DIM,
    )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - top)
    acc = acc * (v_scale / total)[:, None]
    out = out_base + tokens[:, None] * out_stride + head * DIM + dims[None, :]
    tl.store(out, acc.to(out_base.dtype.element_ty), mask=is_query[:, None])


def tile_for(dim: int) -> Tile:
    """The best tile tried on an H100: 128 queries and 64 keys for four warps; smaller for wide heads, to fit the registers."""
    return Tile(128, 64, 4, 3) if dim <= 128 else Tile(64, 32, 4, 2)


def piece_attention(
    qkv: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    table: Tensor,
    places: Tensor,
    firsts: Tensor,
    bounds: Tensor,
    contexts: Tensor,
    scale: float,
    out: Tensor,
    *,
    most_queries: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """qkv [T, >= Hq * D], out [T, Hq * D]. Piece i has bounds[i + 1] - bounds[i] queries from token firsts[i] on: the last of
    the first contexts[i] tokens of the sequence at table[places[i]]. most_queries >= bounds[-1]. D is a power of two."""
    _, kv_heads, block_size, dim = kv.k.shape
    tile = tile or tile_for(dim)
    num_pieces = places.numel()
    unit = scale * kv.k_scale
    _piece_kernel[q_heads, most_queries // tile.queries + num_pieces](
        qkv, out, kv.k, kv.v, table, places, firsts, bounds, contexts, qkv if sinks is None else sinks, num_pieces,
        qkv.stride(0), out.stride(0), table.stride(0), kv.k.stride(0), unit if softcap else unit * LOG2E, softcap, kv.v_scale,
        GROUP=q_heads // kv_heads, WINDOW=window, HAS_SOFTCAP=softcap > 0, HAS_SINKS=sinks is not None,
        QUERIES=tile.queries, KEYS=tile.keys, BLOCK=block_size, DIM=dim, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out

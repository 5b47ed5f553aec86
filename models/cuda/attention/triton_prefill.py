"""Causal attention of query runs over the paged cache as Triton kernels: any lengths, windows, soft caps, sinks, fp8.

Imported by models.cuda.attention.registry if Triton is installed. They read keys and values in the paged cache without
gathering, and their launch depends on sizes only, so it can be captured in a CUDA graph.

The lines of a tile are the queries of a few tokens for several heads of one KV head, so that a short chunk fills its tiles. Where
the tiles of a step are too few for the GPU, the keys of each are split over programs whose results are merged by a second
kernel (Flash-Decoding, Dao et al. 2023); tiles with few keys are not, whatever the launch.

Legend: T tokens, P pieces, Hq query heads, Hk KV heads, D head dim. Tiles and online softmax as in Dao 2023.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,import-not-found,untyped-decorator,misc,operator"

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trireme.models.cuda.ops import CudaPagedKV

LOG2E = 1.4426950408889634
RESIDENT = 2  # programs that a multiprocessor runs at a time
MOST_SPLITS = 32
SPLIT_COST = 0.08  # of a program's time without splits, per split: its results are written and merged
LEAST_SPLIT = 256  # keys of a split


class Tile(NamedTuple):
    """Tile of a program, lines and keys, and its compile options."""

    lines: int
    keys: int
    warps: int
    stages: int


@triton.jit
def _piece_of(bounds, num_pieces, tile, TOKENS: tl.constexpr):
    """The piece of a tile: piece p owns the tiles from bounds[p] // TOKENS + p on."""
    found = -1
    for begin in range(0, num_pieces, 64):
        piece = begin + tl.arange(0, 64)
        is_piece = piece < num_pieces
        start = tl.load(bounds + piece, mask=is_piece, other=0)
        found += tl.sum((is_piece & (start // TOKENS + piece <= tile)).to(tl.int32), 0)
    return found


@triton.jit
def _piece_of_query(bounds, num_pieces, index):
    """The piece of a query, of those before bounds[num_pieces]."""
    found = -1
    for begin in range(0, num_pieces, 64):
        piece = begin + tl.arange(0, 64)
        is_piece = piece < num_pieces
        start = tl.load(bounds + piece, mask=is_piece, other=0)
        found += tl.sum((is_piece & (start <= index)).to(tl.int32), 0)
    return found


@triton.jit
def _split_of(keys, splits, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Keys of each split of a tile that sees `keys`, a multiple of KEYS."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, KEYS), splits) * KEYS, LEAST)


@triton.jit
def _keys_of(base, context, TOKENS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """(first, last) of the keys that a tile sees whose first query is at `base`; first is a multiple of KEYS."""
    low = 0
    if WINDOW:
        low = tl.maximum(base - WINDOW + 1, 0) // KEYS * KEYS
    return low, tl.minimum(context, base + TOKENS)


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
    at = first + tl.arange(0, KEYS)
    block = tl.load(blocks + at // BLOCK, mask=at < last, other=0)
    for start in range(first, last, KEYS):
        at = start + tl.arange(0, KEYS)
        is_key = at < last
        offset = block.to(tl.int64) * block_stride + (at % BLOCK) * DIM
        block = tl.load(
            blocks + (at + KEYS) // BLOCK, mask=at + KEYS < last, other=0
        )  # early: keys wait for their address
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


@triton.jit
def _attend_keys(
    q, k_base, v_base, blocks, low, stop, base, positions, scale, softcap, block_stride,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """(weighted values, largest score, sum of weights) over the keys from `low` to `stop`; `base`: the first position."""
    acc = tl.zeros([LINES, DIM], tl.float32)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    whole = (base + 1) // KEYS * KEYS  # up to here every query sees every key, except with a window
    if WINDOW:
        whole = low
    whole = tl.maximum(low, tl.minimum(whole, stop // KEYS * KEYS))
    acc, top, total = _attend(
        acc, top, total, q, k_base, v_base, blocks, low, whole, positions, scale, softcap, block_stride,
        WINDOW, HAS_SOFTCAP, False, KEYS, BLOCK, DIM,
    )  # fmt: skip
    return _attend(
        acc, top, total, q, k_base, v_base, blocks, whole, stop, positions, scale, softcap, block_stride,
        WINDOW, HAS_SOFTCAP, True, KEYS, BLOCK, DIM,
    )  # fmt: skip


# Sizes and addresses that change between steps must not trigger recompilation.
@triton.jit(
    do_not_specialize=["num_pieces", "most_queries", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table", "places", "firsts", "bounds", "contexts"],
)
def _piece_kernel(
    q_base, out_base, parts, sums, k_base, v_base,
    table, places, firsts, bounds, contexts, sinks, num_pieces, most_queries, num_heads, splits,
    q_stride, out_stride, table_stride, block_stride, scale, softcap, v_scale,
    GROUP: tl.constexpr, PACK: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    HAS_SPLITS: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // PACK
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # last tiles have the longest context: start them first
    head = tl.program_id(0) * PACK
    piece = _piece_of(bounds, num_pieces, tile, TOKENS)
    begin = tl.load(bounds + piece)
    count = tl.load(bounds + piece + 1) - begin
    first = (tile - (begin // TOKENS + piece)) * TOKENS
    if first >= count:
        return
    context = tl.load(contexts + piece)
    base = context - count + first  # position of the tile's first query
    low, stop = _keys_of(base, context, TOKENS, KEYS, WINDOW)
    num_splits = 1
    split = 0
    if HAS_SPLITS:
        size = _split_of(stop - low, splits, KEYS, LEAST)
        split = tl.program_id(1)
        num_splits = tl.cdiv(stop - low, size)
        if split >= num_splits:
            return
        low += split * size
        stop = tl.minimum(stop, low + size)
    blocks = table + tl.load(places + piece).to(tl.int64) * table_stride
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIM)
    query = first + lines // PACK
    heads = head + lines % PACK
    positions = base + lines // PACK
    is_query = query < count
    tokens = (tl.load(firsts + piece) + query).to(tl.int64)
    places_of_q = tokens * q_stride + heads * DIM
    q = tl.load(q_base + places_of_q[:, None] + dims[None, :], mask=is_query[:, None], other=0.0)
    kv_head = head // GROUP
    k_head = k_base + kv_head.to(tl.int64) * (BLOCK * DIM)
    v_head = v_base + kv_head.to(tl.int64) * (BLOCK * DIM)
    acc, top, total = _attend_keys(
        q, k_head, v_head, blocks, low, stop, base, positions, scale, softcap, block_stride,
        WINDOW, HAS_SOFTCAP, LINES, KEYS, BLOCK, DIM,
    )  # fmt: skip
    if num_splits > 1:
        at = (split * most_queries + begin + query) * num_heads + heads
        tl.store(parts + at[:, None] * DIM + dims[None, :], acc, mask=is_query[:, None])
        tl.store(sums + at * 2, top, mask=is_query)
        tl.store(sums + at * 2 + 1, total, mask=is_query)
    else:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + heads) * 1.4426950408889634 - top)
        acc = acc * (v_scale / total)[:, None]
        out = out_base + (tokens * out_stride + heads * DIM)[:, None] + dims[None, :]
        tl.store(out, acc.to(out_base.dtype.element_ty), mask=is_query[:, None])


@triton.jit(
    do_not_specialize=["num_pieces", "most_queries", "splits"],
    do_not_specialize_on_alignment=["firsts", "bounds", "contexts"],
)
def _merge_kernel(
    out_base, parts, sums, firsts, bounds, contexts, sinks, num_pieces, most_queries, num_heads, splits,
    out_stride, v_scale,
    WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    LEAST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one query for HEADS heads, unless its tile had only one."""
    index = tl.program_id(1)
    if index >= tl.load(bounds + num_pieces):
        return
    piece = _piece_of_query(bounds, num_pieces, index)
    begin = tl.load(bounds + piece)
    count = tl.load(bounds + piece + 1) - begin
    context = tl.load(contexts + piece)
    query = index - begin
    low, stop = _keys_of(context - count + query // TOKENS * TOKENS, context, TOKENS, KEYS, WINDOW)
    num_splits = tl.cdiv(stop - low, _split_of(stop - low, splits, KEYS, LEAST))
    if num_splits == 1:
        return
    dims = tl.arange(0, DIM)
    heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    acc = tl.zeros([HEADS, DIM], tl.float32)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for split in range(num_splits):
        at = (split * most_queries + index) * num_heads + heads
        new = tl.load(sums + at * 2)
        new_top = tl.maximum(top, new)
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep, factor = tl.exp2(top - anchor), tl.exp2(new - anchor)
        total = total * keep + tl.load(sums + at * 2 + 1) * factor
        acc = acc * keep[:, None] + tl.load(parts + at[:, None] * DIM + dims[None, :]) * factor[:, None]
        top = new_top
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + heads) * 1.4426950408889634 - top)
    acc = acc * (v_scale / total)[:, None]
    token = (tl.load(firsts + piece) + query).to(tl.int64)
    out = out_base + (token * out_stride + heads * DIM)[:, None] + dims[None, :]
    tl.store(out, acc.to(out_base.dtype.element_ty))


def tile_for(dim: int) -> Tile:
    """The best tile tried on an H200 (docs/benchmarks/gpu-mixed-steps.md); smaller for wide heads, to fit the registers."""
    return Tile(64, 64, 4, 3) if dim <= 128 else Tile(64, 32, 4, 2)


@lru_cache(maxsize=4096)
def splits_for(programs: int, resident: int) -> int:
    """Splits of the keys in a launch that has `programs` without, on a GPU that runs `resident` of them at a time: those with which
    the programs are done first, if all take as long."""

    def seconds(splits: int) -> float:
        return -(-programs * splits // resident) / splits * (1.0 + SPLIT_COST * splits)

    return min(range(1, MOST_SPLITS + 1), key=seconds)


@lru_cache
def _num_resident(device: torch.device) -> int:
    return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count


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
    splits: int = 0,
) -> Tensor:
    """qkv [T, >= Hq * D], out [T, Hq * D]. Piece i has bounds[i + 1] - bounds[i] queries from token firsts[i] on: the last of
    the first contexts[i] tokens of the sequence at table[places[i]]. most_queries >= bounds[-1]. D is a power of two. `splits`: 0
    for as many as fill the GPU."""
    _, kv_heads, block_size, dim = kv.k.shape
    tile = tile or tile_for(dim)
    num_pieces, group = places.numel(), q_heads // kv_heads
    pack = min(group & -group, tile.lines)  # heads that share a tile: a power of two that divides the group
    tokens = tile.lines // pack
    packs = q_heads // pack
    splits = splits or splits_for(packs * -(-most_queries // tokens), _num_resident(qkv.device))
    parts = sums = qkv  # not used without splits
    if splits > 1:
        parts = torch.empty(splits, most_queries, q_heads, dim, dtype=torch.float32, device=qkv.device)
        sums = torch.empty(splits, most_queries, q_heads, 2, dtype=torch.float32, device=qkv.device)
    unit = scale * kv.k_scale
    some_sinks = qkv if sinks is None else sinks
    same = {"WINDOW": window, "HAS_SINKS": sinks is not None, "KEYS": tile.keys, "DIM": dim}
    same["LEAST"] = max(LEAST_SPLIT, tile.keys)
    _piece_kernel[packs, splits, most_queries // tokens + num_pieces](
        qkv, out, parts, sums, kv.k, kv.v, table, places, firsts, bounds, contexts, some_sinks, num_pieces, most_queries, q_heads,
        splits, qkv.stride(0), out.stride(0), table.stride(0), kv.k.stride(0), unit if softcap else unit * LOG2E, softcap,
        kv.v_scale,
        GROUP=group, PACK=pack, HAS_SOFTCAP=softcap > 0, LINES=tile.lines, BLOCK=block_size,
        HAS_SPLITS=splits > 1, num_warps=tile.warps, num_stages=tile.stages, **same,
    )  # fmt: skip
    if splits > 1:
        heads = min(q_heads & -q_heads, 8)
        _merge_kernel[q_heads // heads, most_queries](
            out, parts, sums, firsts, bounds, contexts, some_sinks, num_pieces, most_queries, q_heads, splits,
            out.stride(0), kv.v_scale,
            TOKENS=tokens, HEADS=heads, num_warps=heads if heads < 4 else 4, **same,
        )  # fmt: skip
    return out

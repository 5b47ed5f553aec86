"""The tensor ops of a decoder layer besides its matrix products: norms, rotary embedding with cache write, paged attention,
gated activation. Every op has a plain torch twin `<op>_reference` of the same signature; the native kernel runs when the
first tensor is float32 on the CPU and the extension is built, the twin otherwise; the kernel's binding (csrc/bind/ops.cpp) raises
ValueError, with the operand's name, for others that do not fit. Called by models/layers; knows no weights.

Legend: T tokens of the step, H hidden, Hq query heads, Hk KV heads, D head_dim, F half the gate_up width, R rows.
Per token, results do not depend on which other tokens are in the step, on chunking, or on the number of threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trireme.models.cpu.kv_blocks import head_dim_of, read_blocks, write_tokens
from trireme.models.forward import ForwardBatch, KVLayer

_native: Any = None
try:
    _native = importlib.import_module("trireme.models._native")
except ImportError:
    pass


def _runs_native(x: Tensor) -> bool:
    return _native is not None and x.dtype is torch.float32 and x.is_cpu


# ---------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim. x [T, H], rows may be strided; `out` may be x."""
    if not _runs_native(x):
        return rms_norm_reference(x, weight, eps, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _native.rms_norm(x, weight, eps, out)
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """residual += x, in place; returns rms_norm(residual). x and residual [T, H]; `out` may be x."""
    if not _runs_native(x):
        return add_rms_norm_reference(x, residual, weight, eps, out)
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _native.add_rms_norm(x, residual, weight, eps, out)
    return out


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    residual += x
    return rms_norm_reference(residual, weight, eps, out)


# ---------------------------------------------------------------- rotary embedding and cache write


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: KVLayer,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotates q in place and writes the rotated k, and v, into the paged cache.

    q [T, Hq, D], k and v [T, Hk, D]: heads contiguous, tokens may be strided (slices of one fused qkv). cos_sin
    [max_position, rot] float32: rot / 2 cosines, then rot / 2 sines of each position; NeoX pairing (i, i + rot / 2), dims from
    rot on pass unrotated. q_norm and k_norm [D] are per-head RMS norms applied before rotation (Qwen3). positions and
    slots [T] int32; a negative slot writes nothing. k itself is left as it was.
    """
    if not _runs_native(q):
        return rope_and_cache_reference(q, k, v, cos_sin, positions, slots, kv, q_norm, k_norm, eps)
    _native.rope_and_cache(q, k, v, cos_sin, positions, slots, kv.k, kv.v, q_norm, k_norm, eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def rope_and_cache_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv: KVLayer,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    if q_norm is not None:
        q.copy_(rms_norm_reference(q, q_norm, eps))
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    q.copy_(_rotate(q.float(), cos, sin))
    written = slots >= 0
    write_tokens(kv, slots[written].long(), _rotate(k.float(), cos, sin)[written], v[written])


# ---------------------------------------------------------------- attention


def paged_attention(
    q: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    *,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of q [T, Hq, D] over the paged cache, prefill and decode rows in one call. Returns [T, Hq * D].

    The query of row r at index i sits at position context_len[r] - num_queries[r] + i and sees the positions up to its
    own, with `window` only the last `window` of them; their KV must be in the cache already. Hq is a multiple of Hk. Scores
    become softcap * tanh(score / softcap) where that is not 0.
    Blocks wholly before the window are never read, so their table entries may be stale.
    """
    if not _runs_native(q):
        return paged_attention_reference(q, kv, batch, scale, window, out, softcap=softcap)
    if out is None:
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
    starts, contexts, table = batch.query_start, batch.context_len, batch.block_table
    _native.paged_attention(q, kv.k, kv.v, starts, contexts, table, scale, window or 0, softcap, out)
    return out


def paged_attention_reference(
    q: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
    *,
    softcap: float = 0.0,
) -> Tensor:
    tokens, heads, dim = q.shape
    result = q.new_zeros(tokens, heads, dim) if out is None else out.view(tokens, heads, dim)
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    for row, context in enumerate(contexts):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        keys, values = _gather_row(kv, batch.block_table[row], context)
        position = torch.arange(context - (stop - start), context, device=q.device).unsqueeze(1)
        token = torch.arange(context, device=q.device).unsqueeze(0)
        seen = token <= position
        if window:
            seen &= token > position - window
        group = heads // keys.shape[0]
        scores = torch.einsum("thd,hsd->hts", q[start:stop].float(), keys.repeat_interleave(group, 0)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        values = torch.where(seen.any(0)[:, None], values, 0.0).repeat_interleave(group, 0)
        result[start:stop] = torch.einsum("hts,hsd->thd", weights, values).to(q.dtype)
    return result.view(tokens, heads * dim)


def _gather_row(kv: KVLayer, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Keys and values [Hk, context, D] of one row, as float32."""
    block_size = kv.k.shape[3]
    keys, values = read_blocks(kv, table[: (context + block_size - 1) // block_size].long().clamp(min=0))
    return keys[:, :context], values[:, :context]


def rope_cache_attention(
    qkv: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    cos_sin: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """rope_and_cache then paged_attention in one call, for the fused product qkv [T, (Hq + 2 Hk) * D]. Returns [T, Hq * D].

    The query part of qkv is rotated in place. Head counts follow from the widths of qkv and of the cache.
    """
    if not _runs_native(qkv):
        return rope_cache_attention_reference(
            qkv,
            kv,
            batch,
            cos_sin,
            scale,
            window=window,
            softcap=softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            out=out,
        )
    if out is None:
        out = torch.empty(qkv.shape[0], qkv.shape[1] - 2 * kv.k.shape[1] * head_dim_of(kv))
    _native.rope_cache_attention(
        qkv,
        kv.k,
        kv.v,
        cos_sin,
        batch.positions,
        batch.slots,
        batch.query_start,
        batch.context_len,
        batch.block_table,
        scale,
        window or 0,
        softcap,
        q_norm,
        k_norm,
        eps,
        out,
    )
    return out


def rope_cache_attention_reference(
    qkv: Tensor,
    kv: KVLayer,
    batch: ForwardBatch,
    cos_sin: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float = 0.0,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    kv_heads, dim = kv.k.shape[1], head_dim_of(kv)
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    rope_and_cache_reference(q, k, v, cos_sin, batch.positions, batch.slots, kv, q_norm, k_norm, eps)
    return paged_attention_reference(q, kv, batch, scale, window, out, softcap=softcap)


# ---------------------------------------------------------------- activation


def swiglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, where gate_up [T, 2 F] holds the F gate columns, then the F up columns. Returns [T, F]."""
    return _gated(_native.swiglu, gate_up, out) if _runs_native(gate_up) else swiglu_reference(gate_up, out)


def swiglu_reference(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated_reference(torch.nn.functional.silu, gate_up, out)


def geglu(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """As swiglu with the tanh form of GELU in the place of SiLU."""
    return _gated(_native.geglu, gate_up, out) if _runs_native(gate_up) else geglu_reference(gate_up, out)


def geglu_reference(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    return _gated_reference(partial(torch.nn.functional.gelu, approximate="tanh"), gate_up, out)


def _gated(kernel: Callable[..., None], gate_up: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    kernel(gate_up, out)
    return out


def _gated_reference(activation: Callable[[Tensor], Tensor], gate_up: Tensor, out: Tensor | None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    product = (activation(gate) * up).to(gate_up.dtype)
    return product if out is None else out.copy_(product)

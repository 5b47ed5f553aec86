"""Reference ops in plain torch with the signatures of models/cuda/ops: the kernels are tested against them, on any device.

None of them is fast and some synchronize. Legend as in models/cuda/ops.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from trireme.models.cuda.attention.prefill import Prompts
from trireme.models.cuda.layers.moe_ops import ExpertActivation, Sorted
from trireme.models.cuda.ops import (
    ALLOWED,
    BARRED,
    BLOCK_BYTES,
    FP8_MAX,
    IN_PROMPT,
    INT8_MAX,
    LISTED,
    MOST_WORD,
    OUTPUTS,
    Q4_K_BYTES,
    CudaPagedKV,
    Scales,
    touched_words,
)
from trireme.models.weights.gguf_expand import IQ4_VALUES


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values in a cache's dtype; float8 saturates as the hardware does."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)


def _bits(x: Tensor) -> Tensor:
    """Float8 as uint8, which torch can index."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _wide(x: Tensor, scales: Scales | None) -> Tensor:
    """x in float32 with its pending scales applied."""
    return x.float() if scales is None else x.float() * (scales.rows[:, None] * scales.columns)


def _summed(x: Tensor, residual: Tensor | None, scales: Scales | None) -> Tensor:
    """The norm's input in float32: residual += x, or x."""
    wide = _wide(x, scales)
    if residual is not None:
        return residual.copy_((wide + residual.float()).to(x.dtype)).float()
    return wide if scales is None else wide.to(x.dtype).float()


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    scales: Scales | None = None,
) -> Tensor:
    """In float32; the sum with the residual is rounded to its dtype first, as is x times its scales."""
    wide = _summed(x, residual, scales)
    return out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset))


def rms_norm_narrow_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Quantizes rms_norm's result in the dtype of x."""
    normed = rms_norm_reference(x, weight, eps, torch.empty_like(x), residual=residual, scales=scales)
    return quantize_rows_reference(normed, out, scale)


def layer_norm_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """In float32; sums are rounded as in rms_norm_reference."""
    wide = _summed(x, residual, scales)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.float()
    return out.copy_(normed if bias is None else normed + bias.float())


def layer_norm_narrow_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    scale: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """Quantizes layer_norm's result in the dtype of x."""
    normed = layer_norm_reference(x, weight, bias, eps, torch.empty_like(x), residual=residual, scales=scales)
    return quantize_rows_reference(normed, out, scale)


def rotary_and_cache_reference(
    qkv: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scales: Scales | None = None,
) -> None:
    """In float32; a normed head is rounded to the dtype before it is rotated, as models do."""
    _, kv_heads, block_size, dim = kv.k.shape
    counts = [q_heads, kv_heads, kv_heads]
    q, k, v = _wide(qkv, scales).unflatten(1, (-1, dim)).split(counts, dim=1)
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)

    def turned(wide: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
            wide = wide.to(qkv.dtype).float()
        half = cos.shape[-1]
        a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    written = slots >= 0
    block, offset = slots[written].long() // block_size, slots[written].long() % block_size
    turned_k = turned(k, k_norm)
    new_k, new_v = turned_k[written] / kv.k_scale, v[written] / kv.v_scale
    _bits(kv.k)[block, :, offset] = _bits(to_stored(new_k, kv.k.dtype))
    _bits(kv.v)[block, :, offset] = _bits(to_stored(new_v, kv.v.dtype))
    for part, found in zip(
        qkv.unflatten(1, (-1, dim)).split(counts, dim=1), (turned(q, q_norm), turned_k, v), strict=True
    ):
        part.copy_(found)


def decode_attention_reference(
    q: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int = 1,
    scratch: Tensor | None = None,
    largest: Tensor | None = None,
) -> Tensor:
    """In float64; ignores splits and scratch."""
    _, kv_heads, _, dim = kv.k.shape
    for row, context in enumerate(context_len[: block_table.shape[0]].tolist()):
        if context == 0:
            out[row] = 0
            continue
        blocks = block_table[row].long()
        found = (_bits(x)[blocks].view(x.dtype).double() for x in (kv.k, kv.v))
        keys, values = (x.transpose(1, 2).flatten(0, 1)[:context] for x in found)
        keys, values = keys * kv.k_scale, values * kv.v_scale
        query = q[row, : q_heads * dim].view(kv_heads, -1, dim).double()
        scores = torch.einsum("hgd,thd->hgt", query, keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if window:
            scores[..., : max(0, context - window)] = float("-inf")
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().view(kv_heads, -1, 1)), -1)
        weights = scores.softmax(-1)[..., :context]
        out[row] = torch.einsum("hgt,thd->hgd", weights, values).flatten().to(out.dtype)
    return _noted(out, largest)


def piece_attention_reference(
    qkv: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    prompts: Prompts,
    scale: float,
    window: int,
    out: Tensor,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """In float64, piece by piece, each query as a decode."""
    bounds, firsts, contexts = (x.tolist() for x in (prompts.bounds, prompts.firsts, prompts.contexts))
    for i, place in enumerate(prompts.places.tolist()):
        count = bounds[i + 1] - bounds[i]
        rows = slice(firsts[i], firsts[i] + count)
        lengths = torch.arange(contexts[i] - count + 1, contexts[i] + 1)
        table = prompts.table[place].expand(count, -1)
        decode_attention_reference(
            qkv[rows],
            q_heads,
            kv,
            table,
            lengths,
            scale,
            out[rows],
            window=window,
            softcap=softcap,
            sinks=sinks,
        )


def quantize_rows_reference(x: Tensor, out: Tensor, scale: Tensor, largest: Tensor | None = None) -> Tensor:
    """In float32. Divides by a tensor: for a Python number, torch on a GPU multiplies by the reciprocal, which rounds twice."""
    wide = x.float()
    largest = wide.abs().amax(-1) if largest is None else largest
    if out.dtype == torch.int8:
        return _int8_rows(wide, out, scale, largest)
    largest = largest.clamp(min=1e-12)
    scale.copy_(largest / torch.full_like(largest, FP8_MAX))
    return out.copy_(to_stored(wide / scale[:, None], out.dtype))


def _int8_rows(wide: Tensor, out: Tensor, scale: Tensor, largest: Tensor) -> Tensor:
    most, is_tiny = torch.full_like(largest, INT8_MAX), largest < 1e-30
    is_used = largest.isfinite() & ~is_tiny
    scale.copy_(torch.where(is_used, largest / most, torch.where(is_tiny, 0.0, float("nan"))))
    codes = (wide * (most / largest)[:, None]).round()
    return out.copy_(torch.where(is_used[:, None], codes, 0.0))


def skinny_int8_reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    ways: int = 0,
) -> Tensor:
    """Bit-exact for any `ways`: float64 holds the sums."""
    return _scaled_sums(x.double() @ weight.double().T, x_scale, scale, out, bias)


def scale_int8_reference(
    sums: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Bit-exact."""
    return _scaled_sums(sums, x_scale, scale, out, bias)


def _scaled_sums(sums: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    found = sums.float() * (scale * x_scale[:, None])
    return out.copy_(found if bias is None else found + bias.float())


def _noted(out: Tensor, largest: Tensor | None) -> Tensor:
    """Returns out, after writing its per-token amax to `largest`."""
    if largest is not None:
        largest.copy_(torch.maximum(largest, out.float().abs().amax(-1)))
    return out


def gated_activation_reference(
    gate_up: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """In float64."""
    a, b = (gate_up if scales is None else _wide(gate_up, scales)).double().chunk(2, -1)
    return _noted(out.copy_(_activated(a, gate) * b), largest)


def activation_reference(
    x: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """In float64."""
    return _noted(out.copy_(_activated((x if scales is None else _wide(x, scales)).double(), gate)), largest)


def _activated(x: Tensor, gate: str) -> Tensor:
    act = torch.nn.functional
    if gate in ("silu", "relu"):
        return act.silu(x) if gate == "silu" else act.relu(x)
    return act.gelu(x, approximate="tanh" if gate == "gelu_tanh" else "none")


def skinny_linear_reference(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    ways: int = 0,
) -> Tensor:
    """In float64, with unquantized x; ignores `ways`."""
    dense = q4_k_values(weight) if weight.dtype == torch.uint8 else weight
    found = x.double() @ dense.to(torch.float64).T
    if scale is not None:
        found *= scale
    return out.copy_(found if bias is None else found + bias)


def two_planes(x: Tensor) -> Tensor:
    """x [M, K] as fp8_linear splits it: a float8 value plus a float8 of 16 times its error, a token's amax scaled to 2^7 .. 2^8."""
    scale = torch.exp2(7 - torch.frexp(x.float().abs().amax(-1, keepdim=True)).exponent + 1)
    lifted = x.float() * scale
    whole = lifted.to(torch.float8_e4m3fn).float()
    rest = ((lifted - whole) * 16).to(torch.float8_e4m3fn).float()
    return (whole.double() + rest.double() / 16) / scale


def fp8_linear_reference(
    x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, scale: Tensor
) -> Tensor:
    """In float64, x rounded as the kernel does."""
    found = two_planes(x) @ weight.to(torch.float64).T * scale
    return out.copy_(found if bias is None else found + bias)


def int8_runs(x: Tensor) -> Tensor:
    """x [M, K] as block_linear quantizes it: int8 with a scale per run of 32, amax / 127. The error of a value is at most its
    run's amax / 254."""
    runs = x.float().unflatten(1, (-1, 32))
    most = runs.abs().amax(-1, keepdim=True)
    codes = (runs * torch.where(most < 1e-30, 0.0, 127.0 / most)).round()
    return (codes * torch.where(most < 1e-30, 0.0, most / torch.full_like(most, 127.0))).flatten(1)


def block_linear_reference(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, form: str) -> Tensor:
    """In float64, x rounded as the kernel does."""
    found = int8_runs(x).double() @ block_values(weight, form).double().T
    return out.copy_(found if bias is None else found + bias)


def block_linear_rows_reference(form: str, n: int, k: int) -> int:
    """As on a GPU with ample shared memory."""
    return 4


def block_values(blocks: Tensor, form: str) -> Tensor:
    """Dequantizes super-blocks of any of ops.BLOCKS to float32 [N, K]; layouts: csrc/cuda/gemm/block_types.cuh."""
    if form == "q4_k":
        return q4_k_values(blocks)
    supers = blocks.reshape(-1, BLOCK_BYTES[form])
    values = _q6_k_values(supers) if form == "q6_k" else _run_values(supers, form)
    return values.view(blocks.shape[0], -1)


def _run_values(supers: Tensor, form: str) -> Tensor:
    """[B, 8, 32] of types with a scale per run of 32 values."""
    if form == "q5_k":
        scales, minima = (x[:, :, None] for x in _six_bit_scales(supers))
        return _five_bits(supers[:, 16:]) * scales - minima
    scales = _halves(supers[:, :16])
    if form == "q8_0":
        return supers[:, 16:].contiguous().view(torch.int8).view(-1, 8, 32) * scales
    if form in ("q4_1", "q5_1"):
        codes = (_four_bits if form == "q4_1" else _five_bits)(supers[:, 32:])
        return codes * scales + _halves(supers[:, 16:32])
    if form == "iq4_nl":
        return torch.from_numpy(IQ4_VALUES).to(supers.device)[_four_bits(supers[:, 16:]).long()] * scales
    codes = _four_bits(supers[:, 16:]) - 8 if form == "q4_0" else _five_bits(supers[:, 16:]) - 16
    return codes * scales


def _q6_k_values(supers: Tensor) -> Tensor:
    """[B, 16, 16]."""
    scales = supers[:, :16].contiguous().view(torch.int8) * supers[:, 16:18].contiguous().view(torch.float16).float()
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=supers.device)
    high = supers[:, 32:96].view(-1, 2, 1, 32) >> shifts[:, None] & 3
    codes = _four_bits(supers[:, 96:]) + high.reshape(-1, 8, 32) * 16.0
    return (codes.view(-1, 16, 16) - 32) * scales[:, :, None]


def _halves(packed: Tensor) -> Tensor:
    """Eight float16 [B, 16] as [B, 8, 1]."""
    return packed.contiguous().view(torch.float16).float()[:, :, None]


def _four_bits(packed: Tensor) -> Tensor:
    """[B, 128] as [B, 8, 32]."""
    chunks = packed.reshape(-1, 4, 32)
    return torch.stack((chunks & 15, chunks >> 4), 2).view(-1, 8, 32).float()


def _five_bits(packed: Tensor) -> Tensor:
    """[B, 32 + 128] as [B, 8, 32]."""
    runs = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return _four_bits(packed[:, 32:]) + (packed[:, None, :32] >> runs[:, None] & 1) * 16.0


def _six_bit_scales(supers: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima [B, 8] of Q4_K and Q5_K."""
    d, dmin = supers[:, :4].contiguous().view(torch.float16).float().split(1, dim=1)
    a, b, c = supers[:, 4:16].split(4, dim=1)
    scales = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), 1).float()
    minima = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), 1).float()
    return d * scales, dmin * minima


def q4_k_values(blocks: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantizes Q4_K super-blocks, uint8 [N, K / 256 * 144], to [N, K]. Layout: block_q4_K of ggml-common.h."""
    supers = blocks.reshape(-1, Q4_K_BYTES)
    scales, minima = _six_bit_scales(supers)
    values = _four_bits(supers[:, 16:]) * scales[:, :, None] - minima[:, :, None]
    return values.to(dtype).view(blocks.shape[0], -1)


def expand_q4_k_reference(blocks: Tensor, out: Tensor) -> Tensor:
    """In float32, rounded once."""
    return out.copy_(q4_k_values(blocks))


def w4_values(codes: Tensor, groups: Tensor) -> Tensor:
    """Dequantizes 4-bit codes, uint8 [N, K / 2], with groups [K / group, N] int32, to float32 [N, K]. Layout:
    csrc/cuda/gemm/grouped.h."""
    n, k = codes.shape[0], codes.shape[1] * 2
    words = codes.view(n, k // 128, 4, 4, 4)  # [outputs, k-steps, lanes, words of a lane, bytes]
    in_turn = words.transpose(2, 3).reshape(n, k // 8, 4)
    places = torch.stack((in_turn & 15, in_turn >> 4), -1).view(n, k // 8, 2, 4)  # even inputs of 8, then odd ones
    steps = places.transpose(2, 3).reshape(n, groups.shape[0], -1).float()
    scale = groups.T.contiguous().view(torch.float16).view(n, -1, 2)[..., :1].float()
    zero = (groups.T >> 16).unsqueeze(-1)
    return ((steps - zero) * scale).view(n, k)


def skinny_w4_reference(x: Tensor, codes: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """In float64."""
    found = x.double() @ w4_values(codes, groups).double().T
    return out.copy_(found if bias is None else found + bias)


def expand_w4_reference(codes: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """In float32, rounded once."""
    return out.copy_(w4_values(codes, groups))


def fp8_blocks_values(weight: Tensor, groups: Tensor) -> Tensor:
    """float8 [N, K] times groups [K / 128, N], float32."""
    return weight.float() * groups.T.repeat_interleave(128, 1)


def skinny_fp8_blocks_reference(
    x: Tensor, weight: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None
) -> Tensor:
    """In float64."""
    found = x.double() @ (weight.double() * groups.double().T.repeat_interleave(128, 1)).T
    return out.copy_(found if bias is None else found + bias)


def expand_fp8_blocks_reference(weight: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """In float32, rounded once."""
    return out.copy_(fp8_blocks_values(weight, groups))


def expand_blocks_reference(blocks: Tensor, out: Tensor, *, form: str) -> Tensor:
    """In float32, rounded once."""
    return out.copy_(block_values(blocks, form))


def route_experts_reference(logits: Tensor, chosen: Tensor, scores: Tensor) -> None:
    """In float32."""
    found = logits.float().sort(stable=True, dim=-1, descending=True)
    count = chosen.shape[1]
    chosen.copy_(found.indices[:, :count])
    scores.copy_(found.values[:, :count].softmax(-1))


def sort_pairs_reference(chosen: Tensor, out: Sorted, num_experts: int) -> None:
    """Keeps the pairs of an expert in ascending order."""
    experts = chosen.flatten().long()
    out.pairs.copy_(experts.argsort(stable=True))
    tiles, first = [], 0
    for expert, count in enumerate(experts.bincount(minlength=num_experts).tolist()):
        tiles += [(expert, first + at, min(out.rows, count - at)) for at in range(0, count, out.rows)]
        first += count
    flat = [len(tiles), *(number for tile in tiles for number in tile)]
    out.tiles[: len(flat)] = torch.tensor(flat, dtype=torch.int32)


def _tiles_of(order: Sorted) -> list[list[int]]:
    """(expert, first place, number of places) of each tile."""
    count, *numbers = order.tiles.tolist()
    return [numbers[3 * at : 3 * at + 3] for at in range(count)]


def expert_gates_reference(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    order: Sorted,
    top_k: int,
    gate: ExpertActivation,
    bias: Tensor | None = None,
) -> Tensor:
    """In float64, rounded once."""
    for expert, first, count in _tiles_of(order):
        rows = order.pairs[first : first + count].long() // top_k
        found = x[rows].double() @ weight[expert].double().T
        gates, ups = (found if bias is None else found + bias[expert].double()).chunk(2, -1)
        if gate.limit > 0:
            gates, ups = gates.clamp(max=gate.limit), ups.clamp(-gate.limit, gate.limit) + 1
        share = torch.sigmoid(gates * (gate.alpha if gate.limit > 0 else 1.0))
        out[first : first + count] = (ups * gates * share).to(out.dtype)
    return out


def expert_outputs_reference(
    x: Tensor, weight: Tensor, out: Tensor, order: Sorted, bias: Tensor | None = None
) -> Tensor:
    """In float64."""
    for expert, first, count in _tiles_of(order):
        found = x[first : first + count].double() @ weight[expert].double().T
        pairs = order.pairs[first : first + count].long()
        out[pairs] = (found if bias is None else found + bias[expert].double()).to(out.dtype)
    return out


def mix_experts_reference(results: Tensor, scores: Tensor, out: Tensor) -> Tensor:
    """In float64."""
    return out.copy_((results.double() * scores.double()[:, :, None]).sum(1))


def gather_rows_reference(
    table: Tensor, ids: Tensor, out: Tensor, *, first: int = 0, count: int | None = None, scale: float = 1.0
) -> Tensor:
    """Rounded once, after the scale."""
    local = ids.long() - first
    inside = (local >= 0) & (local < (table.shape[0] if count is None else count))
    out.copy_(table[local.clamp(0, table.shape[0] - 1)].float() * scale)
    return out.masked_fill_(~inside[:, None], 0)


def copy_blocks_reference(cache: Tensor, pairs: Tensor) -> None:
    """Block by block."""
    for source, destination in pairs.tolist():
        cache[destination] = cache[source]


def _host_record(job: Any, vocab: int) -> list[Tensor]:
    """Bits, marks, listed tokens, words and past of a job's logits-processor record, in host memory."""
    listed, words = int(job["num_listed"]), int(job["num_words"])
    sizes = [touched_words(vocab), vocab, 2 * listed, MOST_WORD * words, MOST_WORD - 1]
    memory = (ctypes.c_int32 * sum(sizes)).from_address(int(job["record"]))
    return list(torch.frombuffer(memory, dtype=torch.int32).split(sizes))


def ruled_logits_reference(logits: Tensor, job: Any, position: int) -> Tensor:
    """Logits [V] of one sequence that sample_rows samples from: after its job's (ops.JOB) logits processors, in float32."""
    wide, vocab = logits.float(), logits.numel()
    if not job["record"]:
        return wide
    bits, marks, listed, words, past = _host_record(job, vocab)
    is_touched = (bits[:, None] >> torch.arange(32) & 1).flatten()[:vocab] == 1
    marks = torch.where(is_touched, marks.long() & 0xFFFFFFFF, 0)
    counts = (marks & OUTPUTS).float()
    rate, frequency, presence = (
        torch.full_like(wide, float(job[f"{name}_penalty"])) for name in ("repetition", "frequency", "presence")
    )
    scaled = torch.where(wide > 0, wide / rate, wide * rate) if job["repetition_penalty"] != 1 else wide
    found = scaled - frequency * counts
    found = torch.where(counts > 0, found - presence, found)
    found = torch.where((counts > 0) | (marks & IN_PROMPT != 0), found, wide)
    biases = listed.view(-1, 2)[:, 1].contiguous().view(torch.float32)
    for token, bias in zip(listed[::2].tolist(), biases, strict=True):
        if marks[token] & LISTED and (bias > -torch.inf or position < job["ends_from"]):
            found[token] += bias
    is_barred = marks & BARRED != 0
    if job["only_allowed"]:
        is_barred |= marks & ALLOWED == 0
    for *head, last in words.view(-1, MOST_WORD):
        head = torch.stack(head)
        is_barred[last] |= bool(is_touched[last]) and bool(((head < 0) | (head == past)).all())
    return found.masked_fill(is_barred, -torch.inf)


def note_output_reference(job: Any, vocab: int, token: int) -> None:
    """Updates the record as sample_rows does after sampling a token for a sequence with logits processors."""
    if not job["record"]:
        return
    bits, marks, _, words, past = _host_record(job, vocab)
    if words.numel():
        past.copy_(torch.cat((past[1:], torch.tensor([token], dtype=torch.int32))))
    if (job["repetition_penalty"], job["frequency_penalty"], job["presence_penalty"]) != (1, 0, 0):
        bits[token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)
        marks[token] += 1

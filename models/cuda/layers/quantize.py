"""Quantizes dense matrices to GPU formats while loading: float8 or int8 with a scale per output, GGUF's Q4_K, grouped formats.

Plain torch on the matrix's device, a bounded number of outputs at a time. Called by models/cuda/weights/sources.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trireme.models.cuda.ops import FP8_MAX, INT8_MAX, Q4_K_BYTES, Q4_K_VALUES

_AT_ONCE = 1 << 25  # values; temporaries take several times four bytes each
FP8_GROUP = 128  # inputs that share a scale in a float8 quant block
_RUN = 32  # values of a super-block that share scale and minimum


def _by_rows(weight: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    step = max(1, _AT_ONCE // weight.shape[1])
    parts = [rounded(weight[start : start + step].float()) for start in range(0, weight.shape[0], step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def fp8_from(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a dense [n, k] to (float8 e4m3 [n, k], scale [n] float32): the amax of each output maps to 448."""
    largest = torch.maximum(weight.amax(1), -weight.amin(1)).float()
    scale = (largest / FP8_MAX).clamp(min=1e-12)
    out = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        out[rows] = (weight[rows].float() / scale[rows, None]).to(out.dtype)
    return out, scale


def int8_from(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a dense [n, k] to (int8 [n, k], scale [n] float32): the amax of each output maps to 127. Bit-identical to
    models.weights.packed.quantize_rows."""
    largest = torch.maximum(weight.amax(1), -weight.amin(1)).float().abs()  # abs: never -0
    is_used, most = largest.isfinite() & (largest >= 1e-30), torch.full_like(largest, INT8_MAX)
    scale = torch.where(largest.isfinite(), largest / most, float("nan"))
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    step = max(1, _AT_ONCE // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        codes = (weight[rows].float() / largest[rows, None] * INT8_MAX).round_()
        out[rows] = torch.where(is_used[rows, None], codes, 0.0).to(out.dtype)
    return out, scale


def q4_k_from(weight: Tensor) -> Tensor:
    """Quantizes a dense [n, k] to Q4_K super-blocks, uint8 [n, k / 256 * 144]; layout: block_q4_K of ggml-common.h.

    Each run of 32 values covers its range in 16 steps; scales and minima are then quantized to 6 bits, and the values
    requantized with those. (ggml also searches for better scales.)
    """
    return _by_rows(weight, _q4_k_rows)


def _q4_k_rows(weight: Tensor) -> Tensor:
    runs = weight.view(-1, Q4_K_VALUES // _RUN, _RUN)  # [super-blocks, 8, 32]
    low = runs.amin(-1).clamp(max=0.0)
    step = (runs.amax(-1) - low) / 15
    scales, d = _six_bits(step)
    minima, dmin = _six_bits(-low)
    unit = d[:, None] * scales
    offset = dmin[:, None] * minima
    codes = ((runs + offset[..., None]) / torch.where(unit > 0, unit, 1.0)[..., None]).round_().clamp_(0, 15)
    codes = codes.to(torch.uint8).view(-1, 4, 2, _RUN)
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).view(-1, Q4_K_VALUES // 2)
    factors = torch.stack((d, dmin), 1).half().view(torch.uint8)
    blocks = torch.cat((factors, _packed(scales, minima), nibbles), 1)
    return blocks.view(weight.shape[0], weight.shape[1] // Q4_K_VALUES * Q4_K_BYTES)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes non-negative [B, 8] to (integers up to 63, scale [B] exact in float16)."""
    unit = (values.amax(-1) / 63).half().float()
    whole = (values / torch.where(unit > 0, unit, 1.0)[:, None]).round_().clamp_(0, 63)
    return torch.where(unit[:, None] > 0, whole, 0.0), unit


def _packed(scales: Tensor, minima: Tensor) -> Tensor:
    """Packs eight 6-bit scales and minima [B, 8] into 12 bytes: the high 2 bits of the last four go with the first four."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = s[:, :4] | (s[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return torch.cat((first, second, third), 1)


# ---------------------------------------------------------------- weights with grouped scales

HEAD = 4  # bytes of a quant block of models/weights/grouped before its codes


def w4_layout(raw: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Converts W4 quant blocks (models/weights/grouped), uint8 [n, row bytes], to (codes uint8 [n, k / 2] in the kernels' order,
    see csrc/cuda/gemm/grouped.h, groups int32 [n, k / size]). 128 divides k."""
    n = raw.shape[0]
    blocks = raw.view(n, -1, HEAD + size // 2)
    groups = blocks[:, :, :HEAD].contiguous().view(torch.int32).view(n, -1)
    pairs = blocks[:, :, HEAD:].reshape(n, -1, 4)  # 8 codes in 4 bytes
    places = torch.cat((pairs & 15, pairs >> 4), -1)
    words = places[:, :, 0::2] | places[:, :, 1::2] << 4
    by_lane = words.view(n, -1, 4, 4, 4).transpose(2, 3)
    return by_lane.reshape(n, -1), groups


def w4_from(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quantizes a dense [n, k] to 4-bit codes with scale and zero per `size` inputs, in w4_layout."""
    return w4_layout(_by_rows(weight, lambda part: _w4_rows(part, size)), size)


def _w4_rows(weight: Tensor, size: int) -> Tensor:
    runs = weight.view(weight.shape[0], -1, size)
    low = runs.amin(-1, keepdim=True).clamp(max=0.0)
    scale = ((runs.amax(-1, keepdim=True).clamp(min=0.0) - low) / 15).clamp(min=1e-6).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((runs / scale.float()).round() + zero).clamp(0, 15).to(torch.uint8)
    head = torch.cat((scale.view(torch.uint8), zero.to(torch.uint8), torch.zeros_like(zero, dtype=torch.uint8)), -1)
    return torch.cat((head, codes[:, :, 0::2] | codes[:, :, 1::2] << 4), -1).view(weight.shape[0], -1)


def fp8_blocks_from(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a dense [n, k] to (float8 [n, k], scale [n, k / 128] float32): the amax of each 128 inputs maps to 448."""
    n, k = weight.shape
    values, scale = fp8_from(weight.reshape(-1, FP8_GROUP))
    return values.view(n, k), scale.view(n, -1)


def fp8_blocks_layout(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Converts FP8_BLOCKS quant blocks (models/weights/packed) to (float8 [n, k], scale [n, k / 128] float32)."""
    blocks = raw.view(raw.shape[0], -1, HEAD + FP8_GROUP)
    scale = blocks[:, :, :HEAD].contiguous().view(torch.float32).view(raw.shape[0], -1)
    return blocks[:, :, HEAD:].reshape(raw.shape[0], -1).view(torch.float8_e4m3fn), scale

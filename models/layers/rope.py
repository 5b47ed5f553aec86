"""Rotary frequencies of every supported scaling rule, and the table of cosines and sines that the kernels read.

Built once per model by models/arch; frequencies are float32 and computed as Hugging Face transformers computes them.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from models.forward import ForwardBatch
from trireme.arch import RopeSpec, yarn_scale


def inverse_frequencies(spec: RopeSpec, length: int = 0) -> Tensor:
    """[dim / 2] float32: radians per position of each rotated pair, in a sequence of `length` tokens (dynamic NTK and
    longrope depend on it beyond the trained length)."""
    if spec.kind == "dynamic":
        spec = msgspec.structs.replace(spec, theta=dynamic_base(spec, length))
    if spec.kind == "longrope":
        factors = torch.tensor(spec.long_factors if length > spec.original_max_position else spec.short_factors)
        return 1.0 / (factors * spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))
    plain = 1.0 / (spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim))
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain


def attention_scale(spec: RopeSpec) -> float:
    """Factor on cosines and sines; 1 except for YaRN and longrope."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope" and spec.factor > 1:
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
    return yarn_scale(spec.factor) if spec.kind == "yarn" else 1.0


def cos_sin_table(spec: RopeSpec, num_positions: int, divisors: Tensor | None = None) -> Tensor:
    """[num_positions, dim] float32: dim / 2 cosines, then dim / 2 sines of each position. `divisors` [dim / 2] further
    divide the frequencies (the tensor rope_freqs of GGUF files, which carries the Llama 3 rule)."""
    frequencies = inverse_frequencies(spec)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    scale = attention_scale(spec)
    return table if scale == 1.0 else table * scale


def dynamic_base(spec: RopeSpec, length: int) -> float:
    """Base of dynamic NTK: the trained one up to the trained length, and such that the longest wave grows with it beyond."""
    trained = spec.original_max_position
    grown = spec.factor * max(length, trained) / trained - (spec.factor - 1)
    return spec.theta * grown ** (spec.dim / (spec.dim - 2))


def depends_on_length(spec: RopeSpec) -> bool:
    """Whether a sequence beyond the trained length is rotated in another way than one within it."""
    return spec.kind in ("dynamic", "longrope")


def step_table(spec: RopeSpec, batch: ForwardBatch) -> Tensor | None:
    """[T, dim] float32, cosines and sines of every token of a step, for rules that depend on the length of the sequence;
    None when every row is within the trained length, where cos_sin_table serves.

    The length is that of the prompt for its tokens, and of the sequence so far for generated ones, as when Hugging Face
    computes a prompt in one piece: neither chunks nor other rows change anything.
    """
    counts = batch.query_start.diff()
    lengths = torch.maximum(batch.num_prompt.repeat_interleave(counts), batch.positions + 1)
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= spec.original_max_position:
        return None
    different, row_of = lengths.clamp(min=spec.original_max_position).unique(return_inverse=True)
    frequencies = torch.stack([inverse_frequencies(spec, length) for length in different.tolist()])
    angles = batch.positions.float()[:, None] * frequencies[row_of]
    wide = angles.double()  # rounded once, so that a token's values do not depend on its place in a vector
    return torch.cat((wide.cos(), wide.sin()), dim=-1).float() * attention_scale(spec)


def _llama3(plain: Tensor, spec: RopeSpec) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended (Llama 3.1's rule)."""
    trained, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wave = 2 * math.pi / plain
    slowed = torch.where(wave > trained / low, plain / spec.factor, plain)
    blend = (trained / wave - low) / (high - low)
    blended = (1 - blend) * slowed / spec.factor + blend * slowed
    between = ~(wave < trained / high) & ~(wave > trained / low)
    return torch.where(between, blended, slowed)


def _yarn(plain: Tensor, spec: RopeSpec) -> Tensor:
    """NTK by parts (arXiv 2309.00071, section 3.2): a ramp over the pairs, from kept to divided by `factor`."""
    low, high = _pair_of_rotations(spec.beta_fast, spec), _pair_of_rotations(spec.beta_slow, spec)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return plain / spec.factor * (1 - kept) + plain * kept


def _pair_of_rotations(rotations: float, spec: RopeSpec) -> float:
    """Index of the pair that turns `rotations` times within the trained length."""
    waves = spec.original_max_position / (rotations * 2 * math.pi)
    return spec.dim * math.log(waves) / (2 * math.log(spec.theta))

"""Rotary frequencies of every supported scaling rule, and the cos/sin table that the kernels read. No torch.

Built once per model. Frequencies and angles are float32, as in Hugging Face transformers; cosines and sines are computed
in float64 and rounded once, so that they depend neither on the instruction set nor on the position in a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from trireme.model.reader import RopeSpec, yarn_scale
from trireme.models.forward import StepBatch
from trireme.models.weights.packed import Floats

_ROWS_AT_A_TIME = 4096  # bounds the temporaries


def inverse_frequencies(spec: RopeSpec, length: int = 0) -> Floats:
    """[dim / 2] float32: radians per position of each rotated pair, in a sequence of `length` tokens (only dynamic NTK and
    longrope depend on it, beyond the trained length)."""
    if spec.kind == "dynamic":
        spec = msgspec.structs.replace(spec, theta=dynamic_base(spec, length))
    exponents = (np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)).astype(np.float64)
    waves = (spec.theta**exponents).astype(np.float32)
    if spec.kind == "longrope":
        factors = spec.long_factors if length > spec.original_max_position else spec.short_factors
        return np.float32(1.0) / (np.array(factors, np.float32) * waves)
    plain = np.float32(1.0) / waves
    if spec.kind == "linear":
        return plain / np.float32(spec.factor)
    if spec.kind == "llama3":
        return _llama3(plain, spec)
    if spec.kind == "yarn":
        return _yarn(plain, spec)
    return plain


def attention_scale(spec: RopeSpec) -> float:
    """Scale applied to cosines and sines; 1 except for YaRN and longrope."""
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.kind == "longrope" and spec.factor > 1:
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_position))
    return yarn_scale(spec.factor) if spec.kind == "yarn" else 1.0


def cos_sin_table(spec: RopeSpec, num_positions: int, divisors: Floats | None = None, *, length: int = 0) -> Floats:
    """[num_positions, dim] float32: dim / 2 cosines, then dim / 2 sines of each position, in a sequence of `length` tokens.
    `divisors` [dim / 2] further divide the frequencies (the tensor rope_freqs of GGUF files, which carries the Llama 3 rule)."""
    frequencies = inverse_frequencies(spec, length)
    if divisors is not None:
        frequencies = frequencies / divisors
    table = np.empty((num_positions, spec.dim), np.float32)
    for start in range(0, num_positions, _ROWS_AT_A_TIME):
        stop = min(start + _ROWS_AT_A_TIME, num_positions)
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * frequencies
        _fill(table[start:stop], angles, attention_scale(spec))
    return table


def dynamic_base(spec: RopeSpec, length: int) -> float:
    """Base of dynamic NTK: theta up to the trained length; beyond it, grown so that the longest wavelength scales with it."""
    trained = spec.original_max_position
    grown = spec.factor * max(length, trained) / trained - (spec.factor - 1)
    return spec.theta * grown ** (spec.dim / (spec.dim - 2))


def depends_on_length(spec: RopeSpec) -> bool:
    """Whether sequences beyond the trained length use other frequencies than those within it."""
    return spec.kind in ("dynamic", "longrope")


class TableRows(NamedTuple):
    """Maps tokens to entries of `long_table`. `trained` is 0 for a table with one entry per position."""

    num_positions: int = 0
    trained: int = 0

    def of(
        self, positions: NDArray[np.int32], owner: NDArray[np.int64], num_prompt: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Table entries [T] of tokens at `positions` [T] of the sequences `owner` [T], whose prompts have num_prompt[owner]
        tokens, by step_table's rule."""
        if not self.trained:
            return positions
        is_other = (positions < self.trained) & (num_prompt[owner] > self.trained)
        return positions + np.int32(self.num_positions) * is_other


POSITIONS = TableRows()
"""One entry per position."""


def table_rows(spec: RopeSpec, num_positions: int) -> TableRows:
    """The TableRows of a table over `num_positions` positions."""
    trained = spec.original_max_position
    return TableRows(num_positions, trained) if spec.kind == "longrope" and trained < num_positions else POSITIONS


def long_table(spec: RopeSpec, num_positions: int, divisors: Floats | None = None) -> Floats:
    """cos_sin_table that covers both longrope cases: one entry per position as generated tokens are rotated, then the first
    `trained` positions as rotated in longer prompts. Indexed by table_rows(spec, num_positions)."""
    plain = cos_sin_table(spec, num_positions, divisors)
    if not (trained := table_rows(spec, num_positions).trained):
        return plain
    grown = cos_sin_table(spec, num_positions, divisors, length=num_positions)
    return np.concatenate((plain[:trained], grown[trained:], grown[:trained]))


def step_table(spec: RopeSpec, batch: StepBatch[Any]) -> Floats | None:
    """[T, dim] float32, cosines and sines of every token of a step, for rules that depend on the sequence length; None if
    every sequence is within the trained length, where cos_sin_table applies. The batch holds arrays or tensors.

    The length is the prompt's for prompt tokens and the sequence so far for generated ones, as when Hugging Face computes
    a prompt in one piece: results depend neither on chunking nor on other sequences.
    """
    positions, starts, prompts = (np.asarray(x) for x in (batch.positions, batch.query_start, batch.num_prompt))
    lengths = np.maximum(np.repeat(prompts, np.diff(starts)), positions + 1)
    longest = int(lengths.max(initial=0))
    if longest <= spec.original_max_position:
        return None
    different, row_of = np.unique(lengths.clip(min=spec.original_max_position), return_inverse=True)
    frequencies = np.stack([inverse_frequencies(spec, length) for length in different.tolist()])
    table = np.empty((positions.size, spec.dim), np.float32)
    _fill(table, positions.astype(np.float32)[:, None] * frequencies[row_of], attention_scale(spec))
    return table


def _fill(table: Floats, angles: Floats, scale: float) -> None:
    half, wide = angles.shape[1], angles.astype(np.float64)
    table[:, :half], table[:, half:] = np.cos(wide), np.sin(wide)
    if scale != 1.0:
        table *= np.float32(scale)


def _llama3(plain: Floats, spec: RopeSpec) -> Floats:
    """Llama 3.1's rule: frequencies of long wavelengths divided by `factor`, short ones kept, those between interpolated."""
    trained, low, high = spec.original_max_position, spec.low_freq_factor, spec.high_freq_factor
    wave = 2 * math.pi / plain
    slowed = np.where(wave > trained / low, plain / spec.factor, plain)
    blend = (trained / wave - low) / (high - low)
    blended = (1 - blend) * slowed / spec.factor + blend * slowed
    between = ~(wave < trained / high) & ~(wave > trained / low)
    return _narrow(np.where(between, blended, slowed))


def _yarn(plain: Floats, spec: RopeSpec) -> Floats:
    """NTK-by-parts (arXiv 2309.00071, section 3.2): a linear ramp over the pairs, from kept to divided by `factor`."""
    low, high = _pair_of_rotations(spec.beta_fast, spec), _pair_of_rotations(spec.beta_slow, spec)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = (high - low) or 0.001
    ramp = ((np.arange(spec.dim // 2, dtype=np.float32) - low) / width).clip(0, 1)
    kept = 1 - ramp
    return _narrow(plain / spec.factor * (1 - kept) + plain * kept)


def _narrow(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32, copy=False)


def _pair_of_rotations(rotations: float, spec: RopeSpec) -> float:
    """Index of the pair that completes `rotations` rotations within the trained length."""
    waves = spec.original_max_position / (rotations * 2 * math.pi)
    return spec.dim * math.log(waves) / (2 * math.log(spec.theta))


# GGUF files of longrope models store the factors as tensors, not as settings.
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


def complete_rope(rope: RopeSpec, vector: Callable[[str, int], Floats]) -> RopeSpec:
    """`rope` with longrope factors read through `vector` if GGUF stores them as tensors."""
    if rope.kind != "longrope" or rope.short_factors:
        return rope
    short, long = (tuple(vector(name, rope.dim // 2).tolist()) for name in _LONGROPE)
    return msgspec.structs.replace(rope, short_factors=short, long_factors=long)

"""The noise is a pure function of (seed, choice, position, token), is what its definition says, and is fair."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.isas import instruction_set
from trireme.models.native import load_native
from trireme.workers.sampling.gumbel import Floats, NoiseField, argmax_among, gumbels, noise_key, uniforms

SEEDS = st.integers(-(2**63), 2**63 - 1)


def reference_uniform(seed: int, choice: int, position: int, token: int) -> float:
    """The definition of workers/sampling/gumbel.py in plain integers."""
    mask64, mask32, golden = 2**64 - 1, 2**32 - 1, 0x9E3779B97F4A7C15

    def mix64(x: int) -> int:
        x &= mask64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask64
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & mask32
        x = (x ^ (x >> 15)) * 0x846CA68B & mask32
        return x ^ (x >> 16)

    key = mix64(mix64(mix64(seed + golden) + golden * (choice + 1)) + golden * (position + 1))
    x = mix32((mix32((token * 0x9E3779B9 & mask32) ^ (key & mask32)) + (key >> 32)) & mask32)
    return (x + 0.5) / 2**32


@settings(deadline=None)
@given(SEEDS, st.integers(0, 127), st.integers(0, 2**20), st.lists(st.integers(0, 2**20), min_size=1, max_size=8))
def test_uniforms_follow_the_definition(seed: int, choice: int, position: int, tokens: list[int]) -> None:
    got = uniforms(noise_key(seed, choice, position), np.array(tokens))
    assert got.tolist() == [reference_uniform(seed, choice, position, token) for token in tokens]


def test_the_definition_is_frozen() -> None:
    """These values may never change: streams that move between versions continue with the same draws."""
    key = noise_key(42, 0, 7)
    assert key == 5876300023532657469
    assert uniforms(key, np.arange(3)).tolist() == [0.6670244830893353, 0.26544644066598266, 0.5336691279662773]


@settings(deadline=None, max_examples=300)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.01, 0.3, 1.0, 3.0, 100.0]),
    st.sampled_from([0.0, 0.5, 3.0, 30.0]),
    st.sampled_from([1, 2, 63, 320, 5000]),
    st.sampled_from(["numpy", "portable", "native"]),
)
def test_race_finds_the_exact_winner(seed: int, temperature: float, spread: float, size: int, search: str) -> None:
    """Every search in float32 gives the token that the float64 definition gives, at any temperature and shape."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * spread).astype(np.float32)
    logits[rng.random(size) < 0.2] = -np.inf
    if not np.isfinite(logits).any():
        logits[0] = 0.0
    peak, key = float(logits.max()), noise_key(seed, 3, size)
    ids = np.arange(size)
    exact = argmax_among(ids, logits, peak, temperature, key)
    if search == "numpy":
        assert NoiseField(size).argmax(logits, peak, temperature, key) == exact
    else:
        native = load_native()
        with instruction_set("portable" if search == "portable" else native.best_isa()):
            found = native.race(logits, peak, temperature, key)
        assert found == exact or (found == -1 and is_close_race(logits, peak, temperature, key))
    assert logits[exact] > -np.inf
    scores = (logits.astype(np.float64) - peak) / temperature + gumbels(key, ids)
    assert exact == int(scores.argmax())


def is_close_race(logits: Floats, peak: float, temperature: float, key: int) -> bool:
    """True when the two best scores are too near for a decision between machines."""
    scores = np.sort((logits.astype(np.float64) - peak) / temperature + gumbels(key, np.arange(logits.size)))
    return bool(logits.size > 1 and scores[-1] - scores[-2] < 1e-8 * (1 + abs(scores[-1])))


def test_draws_are_fair() -> None:
    """Chi-square over 10,000 draws: frequencies are those of the softmax (the limit is the 1e-6 quantile)."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32))
    field, draws = NoiseField(6), 10_000
    counts = np.zeros(6)
    for position in range(draws):
        counts[field.argmax(logits, float(logits[0]), 1.0, noise_key(9, 0, position))] += 1
    expected = np.exp(logits.astype(np.float64)) * draws
    assert ((counts - expected) ** 2 / expected).sum() < 35.9


def test_neighbouring_keys_are_independent() -> None:
    """Noise of neighbouring seeds, choices and positions is uncorrelated, and uniform over the vocabulary."""
    tokens, size = np.arange(50_000), 50_000
    base = uniforms(noise_key(1, 0, 100), tokens)
    assert abs(base.mean() - 0.5) < 5 / math.sqrt(12 * size)
    for seed, choice, position in [(2, 0, 100), (1, 1, 100), (1, 0, 101), (-1, 0, 100), (0, 1, 100)]:
        other = uniforms(noise_key(seed, choice, position), tokens)
        assert abs(float(np.corrcoef(base, other)[0, 1])) < 5 / math.sqrt(size)

"""Random numbers as a pure function of (seed, choice, absolute position, token): the same draw in any batch, on any engine.

Called by workers.sampling.sampler. No generator state, so batch neighbours, retries and preemptions cannot consume random numbers.

The definition, in unsigned integers, for C++ and CUDA to match bit for bit:

    mix64(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31   (mod 2^64)
    mix32(x):  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16                   (mod 2^32)

    G     = 0x9E3779B97F4A7C15
    key   = mix64(mix64(mix64(seed + G) + G * (choice + 1)) + G * (position + 1))     seed taken mod 2^64
    x     = mix32(mix32((token * 0x9E3779B9) ^ (key mod 2^32)) + (key >> 32))
    v     = (x + 1/2) / 2^32        uniform in (0, 1), exact in float64
    E     = -log1p(-v)              standard exponential
    g     = -log(E)                 standard Gumbel

`position` is the index the new token will have in its sequence (prompt and outputs counted together, from 0). The sampled
token is argmax(z + g) with z = (logit - max logit) / temperature, both in float64, lowest id on a tie. Because E >= v,
that argmax equals an integer-and-float32 search for the least v * exp(-z) followed by an exact comparison of the few tokens
that could still win; `NoiseField.argmax` does this in numpy, csrc/cpu/sampling/sampling_impl.h in its own way, and the result
does not depend on the float32 search's last digits.

mix64 is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, with Stafford's constants); mix32 is Wellons' lowbias32.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B9
_MASK64 = (1 << 64) - 1
_HALF = np.float32(0.5)
_SLACK = (
    1.0 + 1e-3
)  # far above the float32 error of v * exp(-z) near the winner, far below what would admit many tokens

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


def mix64(x: int) -> int:
    """Finaliser of SplitMix64 on one 64-bit integer."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def noise_key(seed: int, choice: int, position: int) -> int:
    """64-bit key of all the noise at one position of one choice."""
    key = mix64(seed + GOLDEN64)
    key = mix64(key + GOLDEN64 * (choice + 1))
    return mix64(key + GOLDEN64 * (position + 1))


def _mix32(x: NDArray[np.uint32], spare: NDArray[np.uint32]) -> None:
    """lowbias32 in place; `spare` has the shape of x."""
    np.right_shift(x, 16, out=spare)
    np.bitwise_xor(x, spare, out=x)
    np.multiply(x, np.uint32(0x7FEB352D), out=x)
    np.right_shift(x, 15, out=spare)
    np.bitwise_xor(x, spare, out=x)
    np.multiply(x, np.uint32(0x846CA68B), out=x)
    np.right_shift(x, 16, out=spare)
    np.bitwise_xor(x, spare, out=x)


def _hash(scrambled: NDArray[np.uint32], key: int, x: NDArray[np.uint32], spare: NDArray[np.uint32]) -> None:
    """x = hash of tokens given as token * GOLDEN32."""
    np.bitwise_xor(scrambled, np.uint32(key & 0xFFFFFFFF), out=x)
    _mix32(x, spare)
    np.add(x, np.uint32(key >> 32), out=x)
    _mix32(x, spare)


def uniforms(key: int, tokens: Ids) -> NDArray[np.float64]:
    """v of the given tokens, exact, in (0, 1)."""
    scrambled = tokens.astype(np.uint32) * np.uint32(GOLDEN32)
    x = np.empty_like(scrambled)
    _hash(scrambled, key, x, np.empty_like(x))
    return (x.astype(np.float64) + 0.5) * 2.0**-32


def gumbels(key: int, tokens: Ids) -> NDArray[np.float64]:
    """Standard Gumbel noise of the given tokens."""
    return -np.log(-np.log1p(-uniforms(key, tokens)))


class NoiseField:
    """Samples over a vocabulary with preallocated scratch arrays. One instance per thread."""

    def __init__(self, vocab_size: int) -> None:
        self._scrambled = np.arange(vocab_size, dtype=np.uint32) * np.uint32(GOLDEN32)
        self._x, self._spare = np.empty_like(self._scrambled), np.empty_like(self._scrambled)
        self._ratio, self._weight = np.empty(vocab_size, np.float32), np.empty(vocab_size, np.float32)

    def argmax(self, logits: Floats, peak: float, temperature: float, key: int) -> int:
        """The argmax of (logits - peak) / temperature + noise over the whole vocabulary; `peak` is the greatest logit.

        Logits of -inf never win. Exact: equal to `argmax_among` over all tokens.
        """
        rivals = self._rivals(logits, peak, temperature, key)
        if rivals.size == 1:
            return int(rivals[0])
        return argmax_among(rivals, logits[rivals], peak, temperature, key)

    def _rivals(self, logits: Floats, peak: float, temperature: float, key: int) -> Ids:
        """Tokens that can win: those whose v * exp(depth), at most E * exp(depth), is within the leader's E * exp(depth)."""
        ratio, weight = self._ratio, self._weight
        _hash(self._scrambled, key, self._x, self._spare)
        np.subtract(np.float32(peak), logits, out=weight)
        with np.errstate(over="ignore"):
            np.multiply(weight, np.float32(1.0 / temperature), out=weight)
            np.exp(weight, out=weight)
            np.copyto(ratio, self._x, casting="same_kind")
            np.add(ratio, _HALF, out=ratio)
            np.multiply(ratio, weight, out=ratio)
        leader = int(ratio.argmin())
        v = (float(self._x[leader]) + 0.5) * 2.0**-32
        bound = float(ratio[leader]) * (-math.log1p(-v) / v) * _SLACK
        return np.flatnonzero(ratio <= np.float32(bound))


def argmax_among(ids: Ids, logits: Floats, peak: float, temperature: float, key: int) -> int:
    """The argmax of (logits - peak) / temperature + noise among `ids` (ascending); logits[i] belongs to ids[i]."""
    score = (logits.astype(np.float64) - peak) / temperature + gumbels(key, ids)
    return int(ids[int(score.argmax())])

"""Tokens kept for sampling: top-k, then top-p of what remains, then min-p. Pure functions over one sequence's logits.

Called by workers.sampling.sampler and workers.sampling.logprobs; csrc/cpu/sampling/sampling_impl.h finds exactly the same sets.
Ties are broken towards lower ids, so that exactly k tokens stay. Top-p is defined over integers: see `masses`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trireme.workers.sampling.gumbel import Floats, Ids

_GROUP = 64  # values per group whose maximum bounds the k-th value
_POWERS = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)  # of 2^f
_UNIT_BITS = 30


def top_ids(logits: Floats, k: int) -> Ids:
    """Ids of the k greatest logits, greatest first, equal ones by ascending id. Fewer when fewer are above -inf."""
    floor = _floor_of_top(logits, k)
    ids = np.flatnonzero(logits >= floor if floor > -math.inf else logits > -math.inf)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:k]]


def _floor_of_top(logits: Floats, k: int) -> float:
    """A lower bound that at least k logits reach, close to the k-th greatest."""
    size = logits.size
    if k >= size:
        return -math.inf
    columns = size // _GROUP
    if k > columns:
        return float(np.partition(logits, size - k)[size - k])
    maxima = logits[: columns * _GROUP].reshape(_GROUP, columns).max(axis=0)
    return float(np.partition(maxima, columns - k)[columns - k])


def depths_of(logits: Floats, peak: float, temperature: float) -> Floats:
    """(peak - logit) / temperature in float32, by multiplication; at least 0."""
    with np.errstate(over="ignore"):
        return (np.float32(peak) - logits) * np.float32(1.0 / temperature)


def masses(depths: Floats) -> NDArray[np.int64]:
    """e^-depth as an integer in units of 2^-30 of the peak's, by float32 steps that are bit-identical on any machine.

    Sums of them are exact in any order. A token below half a unit, 21 nats below the peak, has mass 0.
    """
    with np.errstate(over="ignore"):
        y = np.maximum(np.float32(-32.0), depths * np.float32(-1.44269504))
    n = np.rint(y)
    f = y - n
    p = np.float32(_POWERS[0])
    for power in _POWERS[1:]:
        p = p * f + np.float32(power)
    scale = ((n.astype(np.int32) + np.int32(_UNIT_BITS + 127)) << 23).view(np.float32)
    return (p * scale + np.float32(0.5)).astype(np.int64)


def nucleus(depths: Floats, top_p: float) -> Ids:
    """Indices (ascending) of the smallest set of likeliest tokens whose mass reaches top_p times the total.

    Likelier means lesser depth, then lower index.
    """
    mass = masses(depths)
    total = int(mass.sum())
    target = top_p * float(total)
    # Tokens below an equal share of the mass that may be left out weigh less than that together; the sum tells whether the
    # estimate of that depth was good.
    part = (1.0 - top_p) * total / depths.size * 0.99
    deepest = _UNIT_BITS * math.log(2.0) - math.log(part) if part > 1.0 else math.inf
    heavy = np.flatnonzero(depths <= np.float32(deepest))
    if float(mass[heavy].sum()) < target:
        heavy = np.arange(depths.size)
    order = heavy[np.argsort(depths[heavy], kind="stable")]
    reached = np.cumsum(mass[order]).astype(np.float64)
    return np.sort(order[: int(np.searchsorted(reached, target)) + 1])


def kept(logits: Floats, peak: float, params: Cuts) -> Ids:
    """Ids (ascending) kept for sampling with `params`; `peak` is the greatest logit."""
    top_k, top_p, min_p, temperature = params
    ids: Ids | None = None
    if 0 < top_k < logits.size:
        ids = np.sort(top_ids(logits, top_k))
    if top_p < 1.0:
        inside = nucleus(depths_of(logits if ids is None else logits[ids], peak, temperature), top_p)
        ids = inside if ids is None else ids[inside]
    if min_p > 0.0:
        floor = np.float32(peak + temperature * math.log(min_p))
        ids = np.flatnonzero(logits >= floor) if ids is None else ids[logits[ids] >= floor]
    assert ids is not None, "called for a sequence without top-k, top-p or min-p"
    return ids


Cuts = tuple[int, float, float, float]  # top_k, top_p, min_p, temperature

"""Which tokens stay in the draw: top-k, then top-p of what remains, then min-p. Pure functions over one row.

Called by workers.sampler and workers.logprobs. Ties are broken towards lower ids, so that exactly k tokens stay. No full
sort: a floor under the k-th value comes from group maxima, and top-p sorts only the histogram bin that p falls into.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from workers.noise import Floats, Ids

_GROUP = 64  # values per group whose maximum bounds the k-th value
_BINS = 256
_BINS_PER_NAT = 8.0  # a bin is 1/8 nat wide; the last one takes everything 32 nats below the peak
_SORT_ALL = 512  # up to so many values a plain sort is quicker than the histogram


def top_ids(logits: Floats, k: int) -> Ids:
    """Ids of the k greatest logits, greatest first, equal ones by rising id. Fewer when fewer are above -inf."""
    floor = _floor_of_top(logits, k)
    ids = np.flatnonzero(logits >= floor if floor > -math.inf else logits > -math.inf)
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:k]]


def _floor_of_top(logits: Floats, k: int) -> float:
    """A value that at least k logits reach, close to the k-th greatest."""
    size = logits.size
    if k >= size:
        return -math.inf
    columns = size // _GROUP
    if k > columns:
        return float(np.partition(logits, size - k)[size - k])
    maxima = logits[: columns * _GROUP].reshape(_GROUP, columns).max(axis=0)
    return float(np.partition(maxima, columns - k)[columns - k])


def nucleus(depths: Floats, top_p: float) -> Ids:
    """Indices (rising) of the smallest set of likeliest tokens whose probability reaches top_p.

    `depths` are (logit - peak) / temperature, at most 0; probabilities are relative to all of `depths`.
    """
    if depths.size <= _SORT_ALL:
        return np.sort(_prefix_reaching(depths, np.arange(depths.size), 0.0, top_p * float(_weights(depths).sum())))
    weights = np.exp(depths)
    total = float(weights.sum())
    # Tokens lighter than an equal part of what may be left out weigh less than that together: they stay out.
    heavy = np.flatnonzero(weights >= np.float32((1.0 - top_p) * total / depths.size * (1.0 - 1e-3)))
    if heavy.size <= _SORT_ALL:
        return np.sort(_prefix_reaching(depths, heavy, 0.0, top_p * total))
    return _nucleus_by_bins(depths[heavy], weights[heavy], heavy, top_p * total)


def _nucleus_by_bins(depths: Floats, weights: Floats, ids: Ids, target: float) -> Ids:
    """The same from the columns of many `ids`: whole bins of depth, and a sorted part of the one where target is reached."""
    bins = np.minimum(depths * np.float32(-_BINS_PER_NAT), np.float32(_BINS - 1)).astype(np.int32)
    mass = np.cumsum(np.bincount(bins, weights=weights, minlength=_BINS))
    edge = min(int(np.searchsorted(mass, target)), _BINS - 1)
    crossing = np.flatnonzero(bins == edge)
    before = float(mass[edge - 1]) if edge else 0.0
    partly = _prefix_reaching(depths, crossing, before, target)
    return ids[np.sort(np.concatenate([np.flatnonzero(bins < edge), partly]))]


def _weights(depths: Floats) -> NDArray[np.float64]:
    return np.exp(depths.astype(np.float64))


def _prefix_reaching(depths: Floats, ids: Ids, before: float, target: float) -> Ids:
    """The likeliest of `ids` until `before` plus their weights reaches `target`."""
    order = ids[np.argsort(-depths[ids], kind="stable")]
    reached = before + np.cumsum(_weights(depths[order]))
    return order[: int(np.searchsorted(reached, target)) + 1]


def survivors(logits: Floats, peak: float, params: Cuts) -> Ids:
    """Ids (rising) that stay in the draw of a row with `params`; `peak` is the greatest logit."""
    top_k, top_p, min_p, temperature = params
    ids: Ids | None = None
    if 0 < top_k < logits.size:
        ids = np.sort(top_ids(logits, top_k))
    if top_p < 1.0:
        depths = ((logits if ids is None else logits[ids]) - np.float32(peak)) / np.float32(temperature)
        inside = nucleus(depths, top_p)
        ids = inside if ids is None else ids[inside]
    if min_p > 0.0:
        floor = np.float32(peak + temperature * math.log(min_p))
        ids = np.flatnonzero(logits >= floor) if ids is None else ids[logits[ids] >= floor]
    assert ids is not None, "called for a row without top-k, top-p or min-p"
    return ids


Cuts = tuple[int, float, float, float]  # top_k, top_p, min_p, temperature

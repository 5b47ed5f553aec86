"""Crossover M between our skinny GEMM and torch's, measured on the GPU once per format and shape. Called by
models/cuda/layers/linear and int8_linear while a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_REPEATS = 6
# Larger than a GPU's L2 cache: a step reads weights from memory, so the timing must too.
_CACHE_BYTES = 128 << 20
_crossovers: dict[tuple[Any, ...], int] = {}

Launch = Callable[[], object]
MakeLaunch = Callable[[int], Launch]
"""Makes a launch for a given M."""


def max_rows_own_kernel(
    key: tuple[Any, ...], weight: Tensor, own: MakeLaunch, theirs: MakeLaunch, tried: Sequence[int]
) -> int:
    """The largest M of `tried` up to which our kernel is faster; an M in between uses the result of the next larger one.
    Measured once per key; 0 without a GPU."""
    if not weight.is_cuda:
        return 0
    if key not in _crossovers:
        _crossovers[key] = _measure(own, theirs, tried)
    return _crossovers[key]


def _measure(own: MakeLaunch, theirs: MakeLaunch, tried: Sequence[int]) -> int:
    flush = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")
    best = 0
    for rows in tried:
        if _time(own(rows), flush) > _time(theirs(rows), flush):
            break
        best = rows
    return best


def _time(launch: Launch, flush: Tensor) -> float:
    """Milliseconds of one launch with a cold L2 cache, the minimum of several."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        launch()
        end.record()
    events[-1][1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in events)

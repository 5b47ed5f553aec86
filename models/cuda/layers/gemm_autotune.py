"""Where our kernel for few rows ends and torch's product begins: measured on the card once for each format and shape. Called by
models/cuda/layers/linear and cuda_int8 while a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_REPEATS = 6
# More than a card's last-level cache: weights come from memory in a step, so they must when it is timed.
_CACHE_BYTES = 128 << 20
_crossovers: dict[tuple[Any, ...], int] = {}

Launch = Callable[[], object]
MakeLaunch = Callable[[int], Launch]
"""A launch for so many rows."""


def max_rows_own_kernel(
    key: tuple[Any, ...], weight: Tensor, own: MakeLaunch, theirs: MakeLaunch, tried: Sequence[int]
) -> int:
    """Rows of x, of those in `tried`, up to which our kernel is the faster one; between them the answer of the next greater one
    holds. Measured once for each key; 0 where there is no card."""
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
    """Milliseconds of one launch whose weight is in no cache, the least of several."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_REPEATS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        launch()
        end.record()
    events[-1][1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in events)

"""Device time of a launch without host overhead: a CUDA graph of several launches, the best of a few replays.

Used by workers.collectives.cuda to choose between algorithms; all ranks call it together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

LAUNCHES, REPLAYS = 8, 4


def time_algo(launch: Callable[[], object]) -> float:
    """Microseconds per launch."""
    launch()  # sets up lazy connections
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    graph.replay()
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / LAUNCHES

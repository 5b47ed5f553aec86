"""Parts of tests in which what a GPU's step loop has captured changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.test_gpu_runner import NUM_ROWS
from trireme.workers.cuda import graph_policy
from trireme.workers.cuda.graph_adapt import Adaptation
from trireme.workers.cuda.graph_policy import GraphPolicy, Size
from trireme.workers.cuda.runner import GpuRunner

MOST_BYTES = 1000
IDLE = {"held": 10, "growth": 1, "most_bytes": MOST_BYTES, "capture_s": 0.02, "row_s": 1e-5}


def tight_policies() -> tuple[GraphPolicy, GraphPolicy]:
    """With room for one size more than there is."""
    rows = [(size,) for size in range(1, NUM_ROWS + 1)]
    mixed = [(decodes, tokens) for decodes in range(NUM_ROWS) for tokens in (2, 4, 8, 20, 40)]
    return GraphPolicy([rows[0], rows[-1]], rows, most=3), GraphPolicy([(NUM_ROWS - 1, 40)], mixed, most=3)


def hurry(patch: pytest.MonkeyPatch) -> None:
    """A few steps are reason enough for a change."""
    patch.setattr(graph_policy, "LEAST_STEPS", 2)
    patch.setattr(graph_policy, "WINDOW", 64)


def adaptation_of(runner: GpuRunner, **options: Any) -> Adaptation:
    assert runner._mixed_graphs is not None
    memory = runner._graphs._memory
    memory._most_bytes = MOST_BYTES
    return Adaptation(runner._graphs, runner._mixed_graphs, memory, **options)


def captured_by(runner: GpuRunner) -> list[list[Size]]:
    sets = [graphs.set for graphs in (runner._graphs, runner._mixed_graphs) if graphs is not None]
    for graphs in sets:
        assert sorted(graphs.launches) == sorted(graphs.policy.captured)
    return [graphs.policy.captured for graphs in sets]

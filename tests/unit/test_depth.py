"""How many plans may be under way at once."""

from __future__ import annotations

import pytest

from trireme.config import EngineConfig, ParallelConfig, SchedulerConfig
from trireme.engine_core.executor.base import depth_of


@pytest.mark.parametrize(
    ("pp", "async_steps", "expected"),
    [(1, True, 2), (1, False, 1), (2, True, 2), (3, True, 3), (4, True, 4), (4, False, 4)],
)
def test_every_stage_has_a_plan_and_a_single_one_has_the_next(pp: int, async_steps: bool, expected: int) -> None:
    """Stages cannot run ahead: the first does not see what the last one samples."""
    config = EngineConfig(parallel=ParallelConfig(pp=pp), scheduler=SchedulerConfig(async_steps=async_steps))
    assert config.runs_ahead == (async_steps and pp == 1)
    assert depth_of(config) == expected

"""The model-free benchmark runs, and the engine core stays out of the model's way."""

from __future__ import annotations

import time

import pytest

from trireme.engine_core import bench


def test_a_plan_for_256_rows_costs_far_less_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.time, "perf_counter", time.process_time)  # other processes may share the cores
    timing = bench.measure(256, 40)
    assert timing.plan_us < 1500, timing  # 100 to 200 on a 2025 server core
    assert timing.steps_per_s > 300, timing

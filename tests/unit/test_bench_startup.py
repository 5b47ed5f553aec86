"""The phases of a measured start: they follow each other and add up to the whole, on a CPU and on a GPU."""

from __future__ import annotations

import pytest

from launch.bench_startup import phases_of

CPU = {"spawned": 10.5, "engine-0": 14.0, "front-0": 13.0, "engine.load": 2.0, "engine.kv": 0.25, "engine.weights": 1.5}
GPU = {**CPU, "engine.weights": 0.5, "engine.device": 0.375, "engine.measure": 0.5}
SPANS = ("launcher_s", "engine_boot_s", "libraries_s", "weights_s", "kv_s", "front_wait_s", "first_token_s")


@pytest.mark.parametrize(("stamps", "more"), [(CPU, ()), (GPU, ("device_s", "measure_s"))], ids=["cpu", "gpu"])
def test_phases_add_up(stamps, more):
    phases = phases_of(10.0, stamps, 14.5)
    assert set(phases) == {*SPANS, *more, "total_s", "front_ready_s"}
    assert sum(phases[name] for name in (*SPANS, *more)) == pytest.approx(phases["total_s"])
    assert all(seconds >= 0 for seconds in phases.values())

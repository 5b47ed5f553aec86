"""What a decision costs on the coordinator's real process: every request is answered, and the time is that process's own."""

from __future__ import annotations

import time

import pytest

from trireme.launch.bench import route as bench_route


@pytest.mark.parametrize("policy", bench_route.POLICIES)
def test_every_request_is_answered_and_costs_the_coordinator_some_time(policy: str) -> None:
    began = time.perf_counter()
    figures = bench_route.measure(policy, 200)
    took_us = (time.perf_counter() - began) / 200 * 1e6
    assert figures["requests"] == 200
    assert 0 < figures["trip_p50_us"] <= figures["trip_p99_us"] < took_us * 200
    assert 1 < figures["coordinator_us"] < took_us  # one process, one thread that computes

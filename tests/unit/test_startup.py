"""The parts of a start: they follow each other and add up to the whole, whatever the processes were and whoever was last."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.launch.api.startup import SHOWN_S, Life, breakdown, line_of, process_began
from trireme.phases import Phases, slowest

SPAN = st.floats(0, 1e3)
NAME = st.sampled_from(["import", "weights", "kv", "graphs"])


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(NAME, SPAN, st.none() | st.dictionaries(NAME, st.floats(0, 1)))))
def test_parts_of_a_process_add_up_to_its_time(steps: list[tuple[str, float, dict[str, float] | None]]) -> None:
    clock = Clock()
    phases = Phases(clock=clock)
    for name, seconds, inner in steps:
        if inner is None:
            clock.now += seconds
            phases.end(name)
        else:
            clock.now += seconds + sum(inner.values())
            phases.include(inner, name)
    assert sum(phases.seconds.values()) == pytest.approx(clock.now - 100.0)
    assert all(seconds >= 0 for seconds in phases.seconds.values())


def test_parts_measured_elsewhere_leave_the_rest() -> None:
    clock = Clock()
    phases = Phases(clock=clock)
    clock.now += 4.0
    phases.include(slowest([{"weights": 1.0, "load": 0.5}, {"weights": 2.0, "load": 1.0}]), "workers")
    clock.now += 1.0
    phases.include(slowest([]), "kv")
    assert phases.seconds == {"weights": 2.0, "load": 1.0, "workers": 1.0, "kv": 1.0}


LIFE = st.builds(Life, st.floats(1, 2), st.floats(2, 3), st.dictionaries(NAME, SPAN, max_size=4))


@given(st.dictionaries(st.sampled_from(["engine-0", "engine-1", "engine-2"]), LIFE), SPAN)
def test_parts_of_a_deployment_add_up_to_its_time(engines: dict[str, Life], after: float) -> None:
    last = max((life.began + sum(life.seconds.values()) for life in engines.values()), default=3.0)
    parts = breakdown(0.5, engines, last + after, "fronts")
    assert sum(parts.values()) == pytest.approx(last + after - 0.5)
    assert all(seconds >= -1e-9 for seconds in parts.values())


def test_the_engine_that_was_last_is_told() -> None:
    quick, slow = Life(1.0, 1.5, {"weights": 1.0}), Life(1.0, 1.25, {"weights": 5.0})
    parts = breakdown(0.0, {"engine-0": slow, "engine-1": quick}, 7.0, "fronts")
    assert parts == {"launcher": 1.0, "process": 0.25, "weights": 5.0, "fronts": 0.75}
    assert breakdown(1.0, {}, 3.0, "client") == {"client": 2.0}


def test_a_line_shows_what_can_be_seen() -> None:
    assert line_of({"launcher": 0.31, "kv": SHOWN_S / 2, "weights": 12.0}) == "launcher 0.31  weights 12.00"


def test_this_process_began_in_the_past() -> None:
    began = process_began()
    assert 0.0 < time.monotonic() - began < 3600.0
    assert process_began() == pytest.approx(began, abs=0.02)

"""Sleep and wake: every order in which requests, work and the workers' answers can come."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.engine_core.lifecycle.sleep import SleepState
from trireme.errors import EngineError


class Watched:
    """A SleepState, the orders it gave and the answers it owes."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[str] = []
        self.rest = SleepState(lambda method, args: self.orders.append((method, args)))

    def sleep(self, level: int = 1, num_requests: int = 0) -> bool:
        return self.rest.sleep(level, num_requests, self.answers.append)

    def wake(self) -> None:
        self.rest.wake(self.answers.append)

    def asleep(self, level: int = 1) -> Watched:
        assert self.sleep(level)
        self.rest.done("")
        self.orders.clear()
        self.answers.clear()
        return self


def test_it_sleeps_and_wakes_when_told() -> None:
    one = Watched()
    assert one.sleep(2)
    assert (one.rest.state, one.orders, one.answers) == ("falling", [("sleep", {"level": 2})], [])
    one.rest.done("")
    assert (one.rest.state, one.rest.level, one.answers) == ("asleep", 2, [""])
    one.wake()
    assert (one.rest.state, one.orders[1:]) == ("waking", [("wake", {})])
    assert not one.rest.is_awake
    one.rest.done("")
    assert (one.rest.state, one.rest.level, one.answers) == ("awake", 0, ["", ""])


@pytest.mark.parametrize(
    ("level", "requests", "why"), [(1, 3, "3 requests are under way"), (3, 0, "no sleep of level 3")]
)
def test_what_cannot_be_is_refused(level: int, requests: int, why: str) -> None:
    one = Watched()
    assert not one.sleep(level, requests)
    assert why in one.answers[0]
    assert (one.rest.state, one.orders) == ("awake", [])


def test_who_is_as_asked_is_told_so_at_once() -> None:
    one = Watched().asleep(2)
    assert not one.sleep(1)
    assert one.answers == [""]
    other = Watched()
    other.wake()
    assert (other.answers, other.orders) == ([""], [])


def test_a_light_sleeper_may_sleep_deeper() -> None:
    deeper = Watched().asleep(1)
    assert deeper.sleep(2)
    assert (deeper.rest.state, deeper.orders, deeper.answers) == ("falling", [("sleep", {"level": 2})], [])
    deeper.rest.done("")
    assert (deeper.rest.state, deeper.rest.level, deeper.answers) == ("asleep", 2, [""])
    stuck = Watched().asleep(1)
    assert stuck.sleep(2)
    stuck.rest.work_came()
    stuck.rest.done("no")
    assert (stuck.rest.state, stuck.rest.level, stuck.answers) == ("waking", 1, ["no"])
    assert stuck.orders[1:] == [("wake", {})]


def test_work_wakes_it() -> None:
    one = Watched().asleep()
    one.rest.work_came()
    one.rest.work_came()
    assert (one.rest.state, one.orders) == ("waking", [("wake", {})])
    one.wake()
    assert one.answers == []
    one.rest.done("")
    assert (one.rest.is_awake, one.answers) == (True, [""])


def test_work_that_comes_while_it_falls_asleep_wakes_it_then() -> None:
    one = Watched()
    one.sleep()
    one.rest.work_came()
    one.rest.done("")
    assert (one.rest.state, [method for method, _ in one.orders]) == ("waking", ["sleep", "wake"])
    one.rest.done("")
    assert one.rest.is_awake
    assert one.sleep()
    one.rest.done("")
    assert one.rest.state == "asleep"


def test_workers_that_cannot_sleep_go_on() -> None:
    one = Watched()
    one.sleep()
    one.wake()
    one.rest.done("a worker has no method 'sleep'")
    assert (one.rest.state, one.rest.level) == ("awake", 0)
    assert one.answers == ["a worker has no method 'sleep'", ""]


def test_an_engine_that_cannot_wake_is_lost() -> None:
    one = Watched().asleep()
    one.wake()
    with pytest.raises(EngineError, match="cannot wake: no memory"):
        one.rest.done("no memory")
    assert one.answers == ["no memory"]


@given(st.lists(st.sampled_from(["sleep", "deep", "wake", "work", "done"]), max_size=30))
def test_everybody_is_answered_once_and_one_order_is_under_way(events: list[str]) -> None:
    one, asked = Watched(), 0
    for event in events:
        before = len(one.orders)
        match event:
            case "sleep" | "deep":
                asked += 1
                one.sleep(2 if event == "deep" else 1)
            case "wake":
                asked += 1
                one.wake()
            case "work":
                one.rest.work_came()
            case "done" if one.rest.state in ("falling", "waking"):
                one.rest.done("")
        assert len(one.orders) - before <= 1
        levels = [args.get("level", 0) for _, args in one.orders]  # a wake is 0
        assert all(after == 0 or after > before for before, after in pairwise([0, *levels])), levels
        assert all(after > 0 or before > 0 for before, after in pairwise([0, *levels])), levels
    while one.rest.state in ("falling", "waking"):
        one.rest.done("")
    assert len(one.answers) == asked

"""When workers are told to change what they have captured: between requests or now and then, one order at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine_driver import make_limits, make_worker
from trireme.engine_core.core import EngineCore
from trireme.engine_core.lifecycle.graph_capture import BUSY_STEPS, QUIET_S, Captures
from trireme.engine_core.loop import EngineLoop
from trireme.errors import EngineError
from trireme.params import RowParams
from trireme.transport.wire.messages import StepPlan, StepResult, Submit
from trireme.workers.fake import FakeOptions

NOTHING = float("inf")


class Watched:
    """A Captures and the orders it gave."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.captures = Captures(self.orders.append)

    def look(self, now: float, steps: int = 0, *, is_idle: bool = True) -> int:
        """The orders so far."""
        self.captures.look(now, steps, is_idle=is_idle)
        return len(self.orders)

    def answer(self, done: str = "", error: str = "", **measured: float) -> None:
        self.captures.answered([] if error else [worker(done, **measured)], error)


def worker(done: str = "", **measured: float) -> dict[str, Any]:
    counts = {"captured": 34, "dropped": 1, "replays": 70, "padded": 9}
    known = {"held": 50, "growth": 3, "capture_s": 0.03, "row_s": 2e-5, "most_bytes": 100}
    return {**counts, **known, **measured, "done": done}


def test_an_engine_at_rest_orders_until_nothing_is_left_to_do() -> None:
    watched = Watched()
    assert watched.look(5.0) == 0
    assert watched.captures.next_due(0) == 5.0 + QUIET_S
    assert watched.look(5.0 + QUIET_S / 2) == 0
    assert watched.look(5.0 + QUIET_S) == 1
    assert watched.captures.next_due(0) == NOTHING
    assert watched.look(9.0) == 1, "one at a time"
    watched.answer("measured")
    assert watched.look(9.1) == 2
    watched.answer("add 40")
    assert watched.look(9.2) == 3
    watched.answer()
    assert watched.look(99.0) == 3
    assert watched.captures.next_due(0) == NOTHING
    assert watched.look(100.0, steps=1) == 4, "a step may have changed what is worth it"
    assert [order["known"] is None for order in watched.orders] == [True, False, False, False]
    assert all(order["is_idle"] for order in watched.orders)


def test_between_requests_that_follow_each_other_nothing_is_ordered() -> None:
    watched = Watched()
    for i in range(20):
        watched.look(i * QUIET_S, i, is_idle=False)
        assert watched.look((i + 0.5) * QUIET_S, i) == 0


def test_while_requests_never_end_it_is_ordered_now_and_then() -> None:
    watched = Watched()
    found = []
    for steps in range(4 * BUSY_STEPS):
        if watched.look(steps / 100, steps, is_idle=False) > len(found):
            found.append(steps)
            watched.answer()
    assert found == [BUSY_STEPS, 2 * BUSY_STEPS, 3 * BUSY_STEPS]
    assert not any(order["is_idle"] for order in watched.orders)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 300), st.booleans(), st.booleans()), max_size=60))
def test_no_order_is_given_while_one_is_under_way(turns: list[tuple[float, int, bool, bool]]) -> None:
    watched, answered, now, steps = Watched(), 0, 0.0, 0
    for passed, more, is_idle, answers in turns:
        now, steps = now + passed, steps + more
        assert watched.look(now, steps, is_idle=is_idle) <= answered + 1
        if answers and len(watched.orders) > answered:
            watched.answer()
            answered += 1


def test_workers_are_told_what_all_of_them_measured() -> None:
    watched = Watched()
    watched.look(0.0)
    watched.look(1.0)
    watched.captures.answered(
        [worker(held=10, growth=9, capture_s=0.02, row_s=3e-5), worker(held=30, growth=2, capture_s=0.01, row_s=1e-5)],
        "",
    )
    watched.look(2.0)
    assert watched.orders[1]["known"] == {
        "held": 30,
        "growth": 9,
        "most_bytes": 100,
        "capture_s": 0.02,
        "row_s": 1e-5,
    }
    assert watched.captures.counts == {
        "graphs_captured": 34,
        "graphs_dropped": 1,
        "graph_replays": 70,
        "graph_padded_rows": 9,
        "graph_bytes": 10,
    }


def test_a_worker_that_could_not_ends_the_engine() -> None:
    watched = Watched()
    watched.look(0.0)
    watched.look(1.0)
    with pytest.raises(EngineError, match="rank 1: a step waits"):
        watched.answer(error="rank 1: a step waits for another rank")


def test_memory_that_is_used_up_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.DEBUG, logger="trireme.engine"):
        for i, growth in enumerate((3, 60, 60, 3, 60)):
            watched.look(10.0 * i, i)
            watched.look(10.0 * i + 1, i)
            watched.answer("add 40" if i == 0 else "", growth=growth)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert texts == ["no more graphs are captured: they hold what they may held=50 B next=60 B most=100 B"]
    assert "captures done=add 40 idle=True held=50 growth=3 most_bytes=100" in caplog.records[0].getMessage()


class Site:
    """A loop over a fake worker; its clock goes on a tenth of a second each turn, and calls are answered when a test says so."""

    peers: dict[str, Any] = {}
    progress, stalled = 0, ""

    def __init__(self) -> None:
        self.now, self.calls, self.waits = 0.0, list[tuple[str, Callable[..., None]]](), list[float]()
        limits = make_limits()
        self._worker = make_worker(limits, FakeOptions())
        self._results: list[StepResult] = []
        self.core = EngineCore(limits, depth=1)
        stub: Any = self
        self.loop = EngineLoop(self.core, stub, stub, stub, has_captures=True, clock=lambda: self.now)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.now += 0.1
            self.loop.turn()

    # the executor
    def submit(self, plan: StepPlan) -> None:
        result = self._worker.execute(plan)
        assert result is not None
        self._results.append(result)

    def take_results(self) -> list[StepResult]:
        over, self._results = self._results, []
        return over

    def halted(self) -> str:
        return ""

    def starved_s(self) -> float:
        return 0.0

    def call(self, method: str, args: dict[str, Any], on_reply: Callable[..., None]) -> None:
        self.calls.append((method, on_reply))

    # the front ends and the poller
    def add(self, source: Any, on_ready: Any) -> None: ...

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def broadcast(self, message: Any, role: Any = None) -> None: ...

    def counts(self) -> dict[str, int]:
        return {}


def test_the_loop_orders_between_requests_and_never_in_a_sleep() -> None:
    site = Site()
    site.turns(9)
    assert [method for method, _ in site.calls] == ["adapt"]
    site.calls.pop()[1]([worker("measured")], "")
    site.turns(1)
    site.calls.pop()[1]([worker()], "")
    site.turns(20)
    assert site.calls == []
    assert min(site.waits[-10:]) == 1.0, "nothing to wake up for"
    assert site.loop.stats()["graphs_captured"] == 34
    site.core.submit("front-0", Submit(1, np.arange(5, dtype=np.int32), RowParams(9)), site.now)
    site.turns(8)
    assert site.core.requests
    assert site.calls == [], "a request is under way"
    site.turns(6)
    assert site.core.is_idle
    assert [method for method, _ in site.calls] == ["adapt"]
    site.loop.calls.sleep(1, lambda error: None)
    assert [method for method, _ in site.calls] == ["adapt", "sleep"]
    for _, on_reply in site.calls:
        on_reply([worker("add 40")], "")
    site.calls.clear()
    site.turns(20)
    assert site.loop.stats()["state"] == "asleep"
    assert site.calls == []
    assert min(site.waits[-10:]) == 1.0
    site.loop.sleep_state.work_came()
    site.calls.pop()[1]([], "")
    site.turns(5)
    assert [method for method, _ in site.calls] == ["adapt"]


def test_a_step_that_waits_for_a_change_is_no_stall() -> None:
    """Nor does a worker that never ends one go unnoticed once there is work for it."""
    site = Site()
    site.turns(4)
    assert [method for method, _ in site.calls] == ["adapt"]
    site.take_results = list  # type: ignore[method-assign, assignment]  # the worker is busy with it
    site.core.step_times.note(8, 0.01)
    site.core.submit("front-0", Submit(1, np.arange(5, dtype=np.int32), RowParams(9)), site.now)
    site.turns(9)
    assert site.loop._server.stalled == ""
    site.turns(3)
    assert "has run for" in site.loop._server.stalled
    with pytest.raises(EngineError, match="a worker is stuck"):
        site.turns(160)

"""Two whole engine cores in lock step in one thread: whatever comes in whatever order, tokens are right and nothing is lost."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine_driver import Driver, Row, make_limits
from trireme.coordinator.waves import Waves
from trireme.engine_core.lifecycle.stepping import Independent, Lockstep
from trireme.engine_core.lifecycle.wave import Wave
from trireme.topology.lockstep import Ballot, Mode, agree
from trireme.transport.wire.messages import StepResult, WaveOrder, WaveReport


class Pair:
    """Two engines, their coordinator, and everything on its way between them."""

    def __init__(self, *, ahead: bool, num_blocks: int) -> None:
        limits = make_limits(num_blocks=num_blocks, max_num_seqs=3, max_num_tokens=12, chunk=6)
        self.drivers = [Driver(limits, ahead=ahead) for _ in range(2)]
        self.waves = Waves(2)
        self.ups: list[deque[WaveReport]] = [deque(), deque()]
        self.downs: list[deque[WaveOrder]] = [deque(), deque()]
        self.entered: list[deque[tuple[Ballot, StepResult]]] = [deque(), deque()]
        self.rows: list[tuple[int, Row]] = []
        self.steppings = [
            Lockstep(driver.core, Wave(i, 0, 2 if ahead else 1), lambda report, i=i: self._tell(i, report))  # type: ignore[misc]
            for i, driver in enumerate(self.drivers)
        ]
        for i, stepping in enumerate(self.steppings):
            self.waves.connected(i, 0)
            stepping.settle()

    def _tell(self, i: int, report: WaveReport) -> bool:
        self.ups[i].append(report)
        return True

    def submit(self, i: int, length: int, max_tokens: int) -> None:
        self.rows.append((i, self.drivers[i].submit(length, max_tokens)))
        self.steppings[i].settle()

    def abort(self, at: int) -> None:
        if self.rows:
            i, row = self.rows[at % len(self.rows)]
            self.drivers[i].abort(row)
            self.steppings[i].settle()

    def direct(self, mode: Mode) -> int:
        number = self.waves.direct(mode)
        self._send()
        return number

    def hear(self, i: int) -> bool:
        if not self.ups[i]:
            return False
        self.waves.reported(self.ups[i].popleft())
        self._send()
        return True

    def on_order(self, i: int) -> bool:
        if not self.downs[i]:
            return False
        self.steppings[i].on_order(self.downs[i].popleft())
        self.drivers[i].collect()
        self.steppings[i].settle()
        return True

    def step(self, i: int) -> bool:
        """Plans one step, if this engine may take one; its outcome waits for the other engine."""
        driver = self.drivers[i]
        plan = self.steppings[i].next_plan(driver.now)
        if plan is None:
            return False
        assert plan.ballot is not None
        (result,) = (worker.execute(plan) for worker in driver.workers)
        assert result is not None
        self.entered[i].append((plan.ballot, result))
        while all(self.entered):
            heads = [entered.popleft() for entered in self.entered]
            agreed = agree([ballot for ballot, _ in heads])
            for other, (_, outcome) in zip(self.drivers, heads, strict=True):
                other.answers.append(msgspec.structs.replace(outcome, agreed=agreed))
        return True

    def answer(self, i: int) -> bool:
        driver = self.drivers[i]
        if not driver.answers:
            return False
        result = driver.answers[0]
        driver.answer()
        self.steppings[i].on_result(result)
        self.steppings[i].settle()
        return True

    def run(self) -> None:
        """Until nothing more happens by itself."""
        for _ in range(5000):
            moved = [act(i) for i in range(2) for act in (self.hear, self.on_order, self.step, self.answer)]
            if not any(moved):
                return
        raise AssertionError("it never comes to rest")

    def _send(self) -> None:
        for i, order in self.waves.orders():
            self.downs[i].append(order)


ENGINE = st.integers(0, 1)
EVENTS = st.one_of(
    st.tuples(st.just("submit"), ENGINE, st.integers(1, 20), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("direct"), st.sampled_from(["", "keep", "wait", "abort"])),
    *(st.tuples(st.just(name), ENGINE) for name in ("hear", "on_order", "step", "answer") for _ in range(2)),
    st.tuples(st.just("run")),
)


@settings(max_examples=120, deadline=None)
@given(events=st.lists(EVENTS, max_size=60), ahead=st.booleans(), num_blocks=st.sampled_from([10, 64]))
def test_engines_in_lock_step_lose_nothing(events: list[tuple[Any, ...]], ahead: bool, num_blocks: int) -> None:
    pair = Pair(ahead=ahead, num_blocks=num_blocks)
    for name, *args in events:
        getattr(pair, name)(*args)
    pair.direct("")
    pair.run()
    assert pair.waves.is_parked
    assert pair.drivers[0].core.counters.steps == pair.drivers[1].core.counters.steps
    for i, row in pair.rows:
        assert row.end.reason in ("length", "abort", "error"), row
        assert row.end.reason != "error" or "paused" in row.end.error
        pair.drivers[i].check_tokens(row)
    for driver in pair.drivers:
        driver.core.check_idle()


@settings(max_examples=60, deadline=None)
@given(events=st.lists(EVENTS, max_size=40), mode=st.sampled_from(["keep", "wait", "abort"]))
def test_nothing_steps_while_a_pause_stands(events: list[tuple[Any, ...]], mode: Mode) -> None:
    pair = Pair(ahead=True, num_blocks=64)
    for name, *args in events:
        getattr(pair, name)(*args)
    number = pair.direct(mode)
    pair.run()
    assert pair.waves.standing(number)
    steps = [driver.core.counters.steps for driver in pair.drivers]
    for i in range(2):
        pair.submit(i, 5, 3)
    pair.run()
    assert [driver.core.counters.steps for driver in pair.drivers] == steps
    begun = [driver.core.scheduler.num_begun for driver in pair.drivers]
    assert mode == "keep" or begun == [0, 0]
    assert not any(row.ends for _, row in pair.rows[-2:])


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_engine_alone_answers_when_its_steps_are_over(mode: Mode) -> None:
    driver = Driver(make_limits())
    stepping, answers = Independent(driver.core), list[str]()
    row = driver.submit(9, 6)
    driver.plan()
    stepping.direct(mode, answers.append)
    stepping.settle()
    assert answers == []
    late = driver.submit(5, 2)
    driver.answer()
    stepping.settle()
    assert answers == ([] if mode == "wait" else [""])
    while (plan := stepping.next_plan(driver.now)) is not None:
        assert mode == "wait"
        driver.answers += [result for worker in driver.workers if (result := worker.execute(plan)) is not None]
        driver.answer()
        stepping.settle()
    assert answers == [""]
    assert [len(row.ends), len(late.ends)] == [0 if mode == "keep" else 1, 0]
    stepping.direct("", answers.append)
    stepping.settle()
    driver.run()
    assert answers == ["", ""]
    driver.check_tokens(row)
    driver.check_tokens(late)

"""The load ledger: nothing is counted twice or forgotten, in whatever order reports, returns and losses arrive."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trireme.coordinator.core import Coordinator
from trireme.coordinator.ledger import LEASE_S, Ledger, Outstanding
from trireme.transport.wire.messages import Load, Route

FRONTS = st.sampled_from(["front-0", "front-1"])
ENGINES = st.integers(0, 2)


def test_a_late_report_does_not_erase_a_fresh_ticket() -> None:
    ledger = Ledger()
    first = ledger.give("front-0", 0, 1, 100, now=0.0)
    second = ledger.give("front-0", 0, 2, 50, now=0.0)
    ledger.admit(0, {"front-0": first})
    assert ledger.outstanding(0) == Outstanding(1, 2, 50)
    ledger.admit(0, {"front-0": first})  # the same report once more
    assert ledger.outstanding(0) == Outstanding(1, 2, 50)
    ledger.admit(0, {"front-0": second})
    assert ledger.outstanding(0) == Outstanding()


def test_reports_settle_their_own_front_end_and_engine_only() -> None:
    ledger = Ledger()
    ticket = ledger.give("front-0", 0, 1, 10, now=0.0)
    ledger.give("front-1", 0, 1, 10, now=0.0)
    ledger.give("front-0", 1, 1, 10, now=0.0)
    ledger.admit(0, {"front-0": ticket, "front-9": 5})
    assert ledger.outstanding(0).num_tickets == 1
    assert ledger.outstanding(1).num_tickets == 1


def test_a_returned_ticket_leaves_no_phantom_whichever_it_was() -> None:
    ledger = Ledger()
    ledger.give("front-0", 0, 1, 10, now=0.0)  # this one is returned
    second = ledger.give("front-0", 0, 1, 30, now=0.0)  # this one is used
    ledger.release("front-0", 0, 1)
    ledger.admit(0, {"front-0": second})
    assert ledger.outstanding(0) == Outstanding()


def test_a_lost_ticket_ends_with_its_lease() -> None:
    ledger = Ledger()
    ledger.give("front-0", 0, 1, 10, now=100.0)
    assert ledger.expire(100.0 + LEASE_S) == 0
    assert ledger.expire(100.1 + LEASE_S) == 1
    assert ledger.outstanding(0) == Outstanding()


def test_a_restarted_coordinator_never_gives_a_number_twice() -> None:
    before = [Ledger(epoch=3).give("front-0", 0, 1, 1, now=0.0) for _ in range(3)]
    assert Ledger(epoch=4).give("front-0", 0, 1, 1, now=0.0) > max(before)


def test_front_ends_that_come_and_go_leave_nothing_but_their_numbers() -> None:
    ledger = Ledger()
    numbers = []
    for i in range(100):
        numbers += [ledger.give("front-0" if i % 2 else f"client-{i}", 0, 1, 1, now=0.0) for _ in range(3)]
        ledger.forget_front("front-0" if i % 2 else f"client-{i}")
    assert not ledger._last
    assert not ledger._tickets
    assert len(set(numbers)) == 300


class LedgerMachine(RuleBasedStateMachine):
    """Compares with a plain list of tickets."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.model: list[tuple[str, int, int, int, int, float]] = []  # front, engine, number, rows, tokens, time
        self.highest: dict[tuple[str, int], int] = {}

    @rule(front=FRONTS, engine=ENGINES, rows=st.integers(1, 4), tokens=st.integers(0, 1000))
    def give(self, front: str, engine: int, rows: int, tokens: int) -> None:
        number = self.ledger.give(front, engine, rows, tokens, self.now)
        assert number > self.highest.get((front, engine), 0)
        self.highest[front, engine] = number
        self.model.append((front, engine, number, rows, tokens, self.now))

    @rule(engine=ENGINES, seen=st.dictionaries(FRONTS, st.integers(0, 12)))
    def admit(self, engine: int, seen: dict[str, int]) -> None:
        self.ledger.admit(engine, seen)
        self.model = [t for t in self.model if not (t[1] == engine and t[2] <= seen.get(t[0], -1))]

    @rule(front=FRONTS, engine=ENGINES, count=st.integers(0, 3))
    def release(self, front: str, engine: int, count: int) -> None:
        self.ledger.release(front, engine, count)
        mine = [t for t in self.model if t[:2] == (front, engine)]
        for ticket in mine[max(0, len(mine) - count) :]:
            self.model.remove(ticket)

    @rule(front=FRONTS)
    def forget_front(self, front: str) -> None:
        self.ledger.forget_front(front)
        self.model = [t for t in self.model if t[0] != front]

    @rule(engine=ENGINES)
    def forget_engine(self, engine: int) -> None:
        self.ledger.forget_engine(engine)
        self.model = [t for t in self.model if t[1] != engine]

    @rule(seconds=st.floats(0, LEASE_S))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        self.model = [t for t in self.model if self.now - t[5] <= LEASE_S]

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        for engine in range(3):
            mine = [t for t in self.model if t[1] == engine]
            want = Outstanding(len(mine), sum(t[3] for t in mine), sum(t[4] for t in mine))
            assert self.ledger.outstanding(engine) == want


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_leap_of_the_clock_expires_nothing() -> None:
    core = Coordinator(1, "p2c", random.Random(0))
    core.engine_connected(0, 0)
    core.engine_reported(Load(0, 0, 1, 0, 0, 0, 0, 0, 0, 8, 0.0, {}, 0))
    core.expire(100.0)
    core.route("front-0", Route(1, 10), 100.5)
    core.expire(100.9 + LEASE_S)  # the process was stopped, or its machine asleep
    assert core.ledger.outstanding(0).num_tickets == 1
    for second in range(1, 32):
        core.expire(100.9 + LEASE_S + second)
    assert core.ledger.outstanding(0).num_tickets == 0
    assert core.num_expired == 1

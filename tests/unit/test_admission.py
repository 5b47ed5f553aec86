"""Admission by estimated wait, through a running core: who is let in starts soon, who is not hears it early, no slot is idle."""

from __future__ import annotations

import pytest

from tests.unit.engine_driver import Driver, Row, make_limits
from trireme.engine_core.scheduling.admission import SLACK, ServiceRate

STEP_S = 0.01  # of the driver
ROWS, TOKENS = 4, 20
PER_S = ROWS / (TOKENS * STEP_S)  # requests that can be served
BOUND_S = 1.0


def server(policy: str = "fcfs", **limits: object) -> Driver:
    known = {"max_num_seqs": ROWS, "max_waiting": 500, "num_blocks": 400, "max_waiting_tokens": 100_000}
    driver = Driver(make_limits(**{**known, "max_wait": BOUND_S, **limits}), policy=policy)
    driver.core.check = False  # thousands of events
    return driver


def ask(driver: Driver, **fields: object) -> Row:
    return driver.submit(4, TOKENS, **{"deadline_s": 60.0, **fields})  # type: ignore[arg-type]


def turn(driver: Driver) -> None:
    driver.core.tick(driver.now)
    driver.collect()
    if not driver.step():
        driver.now += STEP_S


def refused(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.ends and row.end.error_code == "overloaded"]


def waits(rows: list[Row]) -> list[float]:
    return sorted(row.firsts[0].queued_s for row in rows if row.firsts)


def test_four_times_the_load_keeps_first_tokens_within_the_bound() -> None:
    driver, rows, seconds = server(), [], 20.0
    while driver.now < seconds:
        while len(rows) < 4 * PER_S * driver.now:
            rows.append(ask(driver))
        turn(driver)
    driver.run()
    late = [row for row in rows[len(rows) // 4 :] if row.firsts]
    assert waits(late)[len(late) // 2] > 0.5 * BOUND_S, "the queue is as long as it may be"
    assert waits(late)[-1] < SLACK * BOUND_S
    served = [row for row in rows if row.firsts]
    assert len(served) >= 0.97 * PER_S * seconds, "and no slot was idle for it"
    out = refused(rows)
    assert len(served) + len(out) == len(rows)
    assert {row.end.retry_after_s > 0 for row in out} == {True}
    assert "the limit is 1 s" in out[-1].end.error


def test_a_burst_is_cut_down_as_soon_as_it_is_known_how_long_it_takes() -> None:
    """Nothing was known when it came, so all were let in; those for whom it takes too long hear it before that time has passed."""
    driver = server()
    rows = [ask(driver) for _ in range(300)]
    assert not refused(rows)
    ended_s = {}
    while not driver.core.is_idle:
        turn(driver)
        for i, row in enumerate(rows):
            if row.ends:
                ended_s.setdefault(i, driver.now)
    assert waits(rows)[-1] < (SLACK + 0.25) * BOUND_S
    out = [i for i, row in enumerate(rows) if row in refused(rows)]
    assert out == list(range(out[0], 300)), "those that came last"
    assert max(ended_s[i] for i in out) < (SLACK + 0.25) * BOUND_S
    assert len(waits(rows)) >= PER_S * BOUND_S


def test_who_cannot_be_refused_is_not() -> None:
    """Those without a deadline (offline work), and those that were let in before, elsewhere."""
    driver = server()
    rows = [ask(driver) for _ in range(100)]
    for _ in range(60):
        turn(driver)
    offline = [ask(driver, deadline_s=0.0) for _ in range(60)]
    moved = [ask(driver, num_moves=1, waited_s=0.5) for _ in range(60)]
    fresh = ask(driver)
    assert refused([fresh]) == [fresh]
    driver.core.check = True
    while not driver.core.is_idle:
        turn(driver)
    assert {row.end.reason for row in (*offline, *moved)} == {"length"}
    assert rows[0].end.reason == "length"


def test_what_a_request_asks_for_itself_counts() -> None:
    driver = server()
    for _ in range(14):
        ask(driver)
    for _ in range(45):
        turn(driver)
    num_waiting = len(driver.core.scheduler.waiting)
    assert num_waiting
    estimate = num_waiting / PER_S
    assert not ask(driver).ends
    assert refused([row := ask(driver, deadline_s=estimate / 2)]) == [row]
    assert refused([row := ask(driver, total_s=estimate / 2)]) == [row]


@pytest.mark.parametrize("policy", ["priority", "fair", "deadline"])
def test_who_goes_first_by_policy_does_not_wait_behind_the_others(policy: str) -> None:
    driver = server(policy)
    for _ in range(100):
        ask(driver, client=b"many")
    for _ in range(60):
        turn(driver)
    assert refused([row := ask(driver, client=b"many")]) == [row]
    urgent = ask(driver, client=b"one", priority=-1, deadline_s=0.9)
    assert not urgent.ends
    while not urgent.ends:
        turn(driver)
    assert urgent.end.reason == "length"


def test_an_engine_that_was_never_full_has_learned_nothing() -> None:
    """A light load starts at once and says nothing of what could be served: the burst after it is let in."""
    driver = server()
    for _ in range(100):
        ask(driver)
        for _ in range(30):
            turn(driver)
    assert not refused([ask(driver) for _ in range(60)])


def test_a_pause_does_not_count_as_waiting() -> None:
    """No step is planned in it, whatever the clock says; who was queued before it, or comes in it, is served after it."""
    driver = server()
    rows = [ask(driver, deadline_s=1000.0) for _ in range(ROWS + 12)]
    for _ in range(45):
        turn(driver)
    for _ in range(200):  # turns of an engine that may not step
        driver.now += 0.5
        driver.core.tick(driver.now)
        driver.collect()
    rows.append(ask(driver, deadline_s=1000.0))
    while not driver.core.is_idle:
        turn(driver)
    assert not refused(rows)


def test_time_counts_only_while_somebody_has_to_wait() -> None:
    rate, now = ServiceRate(8), 0.0
    for _ in range(40):
        now += 0.5
        rate.planned(4, True, now)
    before = rate.wait_s(16)
    assert before == pytest.approx(2.0, rel=0.1)
    rate.planned(0, False, now)
    rate.planned(1, False, now + 9000.0)
    assert rate.wait_s(16) == before

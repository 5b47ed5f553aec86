"""Back-off, budget and breaker: pure, in every order of events."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.transport.resilience import Backoff, Breaker, RetryBudget


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2000), st.floats(0, 50), st.integers(0, 10_000))
def test_waits_are_within_what_their_jitter_says(retry: int, last_s: float, seed: int) -> None:
    dice = random.Random(seed)
    most = min(4.0, 0.1 * 2.0 ** min(retry, 60))
    assert Backoff(base_s=0.1, cap_s=4.0, jitter="none").wait_s(retry, last_s, dice) == most
    assert 0 <= Backoff(base_s=0.1, cap_s=4.0, jitter="full").wait_s(retry, last_s, dice) <= most
    assert most / 2 <= Backoff(base_s=0.1, cap_s=4.0, jitter="equal").wait_s(retry, last_s, dice) <= most
    decorrelated = Backoff(base_s=0.1, cap_s=4.0, jitter="decorrelated").wait_s(retry, last_s, dice)
    assert 0.1 <= decorrelated <= min(4.0, 3 * max(0.1, last_s))


def test_jitter_spreads_a_crowd() -> None:
    """A thousand clients that failed together come back over the whole stretch, not at once."""
    dice = random.Random(1)
    waits = sorted(Backoff(base_s=1.0, jitter="full").wait_s(0, 0.0, dice) for _ in range(1000))
    assert waits[100] < 0.2
    assert waits[900] > 0.8


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), max_size=400), st.floats(0, 1), st.floats(0, 20))
def test_retries_never_exceed_their_share(events: list[bool], ratio: float, reserve: float) -> None:
    budget = RetryBudget(ratio, reserve)
    num_requests = num_retries = 0
    for is_request in events:
        if is_request:
            budget.request()
            num_requests += 1
        else:
            num_retries += budget.withdraw()
        assert num_retries <= reserve + ratio * num_requests + 1e-6


def test_a_breaker_opens_rests_probes_and_closes() -> None:
    breaker = Breaker(threshold=3, rest_s=1.0, most_rest_s=3.0)
    for _ in range(2):
        breaker.failed(breaker.enter(0.0), 0.0)
    breaker.succeeded(breaker.enter(0.0))
    for _ in range(3):
        assert breaker.allows(0.0), "a success starts the count again"
        breaker.failed(breaker.enter(0.0), 0.0)
    assert breaker.state(0.5) == "open"
    assert not breaker.allows(0.5)
    assert breaker.state(1.0) == "half_open"
    probe = breaker.enter(1.0)
    assert not breaker.allows(1.0), "one probe at a time"
    breaker.failed(probe, 1.0)
    assert breaker.state(2.9) == "open", "the second rest is twice as long"
    breaker.left(breaker.enter(3.0))
    assert breaker.allows(3.0), "a probe that was cancelled says nothing"
    breaker.failed(breaker.enter(3.0), 3.0)
    assert breaker.opens_at() == 6.0, "the longest rest"
    breaker.succeeded(breaker.enter(6.0))
    assert breaker.state(6.0) == "closed"


@pytest.mark.parametrize("ending", ["ok", "bad", "left"])
def test_what_was_let_in_before_says_nothing_of_the_probe(ending: str) -> None:
    """A request of better days ends while a probe is under way: the breaker waits for the probe all the same."""
    breaker = Breaker(threshold=1, rest_s=1.0)
    old = breaker.enter(0.0)
    breaker.failed(breaker.enter(0.0), 0.0)
    probe = breaker.enter(1.0)
    end(breaker, ending, old, 1.1)
    assert breaker.state(1.1) == "half_open"
    assert not breaker.allows(1.1)
    breaker.succeeded(probe)
    assert breaker.state(1.1) == "closed"


def end(breaker: Breaker, how: str, ticket: int, now: float) -> None:
    if how == "ok":
        breaker.succeeded(ticket)
    elif how == "bad":
        breaker.failed(ticket, now)
    else:
        breaker.left(ticket)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.sampled_from(["enter", "ok", "bad", "left"]), st.integers(0, 99)), max_size=80
    )
)
def test_a_breaker_is_never_shut_for_ever(events: list[tuple[float, str, int]]) -> None:
    breaker = Breaker(threshold=2, rest_s=1.0, most_rest_s=8.0)
    now, inside, probes = 0.0, list[int](), set[int]()
    for gap, event, choice in events:
        now += gap
        if event == "enter" and breaker.allows(now):
            is_probe = breaker.state(now) == "half_open"
            inside.append(breaker.enter(now))
            if is_probe:
                assert not probes.intersection(inside[:-1]), "one probe at a time"
                probes.add(inside[-1])
        elif inside and event != "enter":
            end(breaker, event, inside.pop(choice % len(inside)), now)
    for ticket in inside:
        breaker.left(ticket)
    assert breaker.allows(now + 8.0)


@pytest.mark.parametrize("jitter", ["none", "full", "equal", "decorrelated"])
def test_every_jitter_is_capped(jitter: str) -> None:
    dice, last = random.Random(3), 0.0
    for retry in range(500):
        last = Backoff(base_s=0.5, cap_s=2.0, jitter=jitter).wait_s(retry, last, dice)  # type: ignore[arg-type]
        assert last <= 2.0

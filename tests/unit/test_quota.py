"""Rates of callers and the adaptive limit: pure, so time is a number and the bounds are hypothesis's to break."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.serving.admission.concurrency import AdaptiveLimit
from trireme.serving.admission.quota import MAX_CALLERS, WINDOW_S, Quota, Quotas, Rates, SlidingWindow, TokenBucket

gaps = st.lists(st.floats(0, 20), max_size=200)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), gaps, st.floats(0, 1e6))
def test_no_window_ever_holds_more_than_the_limit(limit: int, waits: list[float], start: float) -> None:
    window, now, taken = SlidingWindow(limit), start, []
    for wait in waits:
        now += wait
        if window.wait_s(now) == 0:
            window.take(now)
            taken.append(now)
    for last in taken:
        assert sum(last - WINDOW_S < moment <= last for moment in taken) <= limit


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), gaps)
def test_who_waits_as_long_as_told_gets_in(limit: int, waits: list[float]) -> None:
    """And no sooner than a slot before the window allows it."""
    window, now, taken = SlidingWindow(limit), 100.0, []
    for wait in waits:
        now += wait
        needed = window.wait_s(now)
        if needed > 0:
            oldest = sorted(taken)[-limit]
            assert needed <= oldest + WINDOW_S + 1.0 - now + 1e-6
            now += needed + 1e-6
            assert window.wait_s(now) == 0
        window.take(now)
        taken.append(now)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=100))
def test_tokens_of_any_stretch_are_within_rate_and_burst(per_minute: int, takes: list[tuple[float, int]]) -> None:
    bucket, now, taken = TokenBucket(per_minute), 7.0, []
    for gap, count in takes:
        now += gap
        if bucket.wait_s(now) == 0:
            bucket.take(now, count)
            taken.append((now, count))
    for i, (begin, _) in enumerate(taken):
        total = 0
        for moment, count in taken[i:]:
            total += count
            assert total <= per_minute * (1 + (moment - begin) / 60) + 500 + 1e-6


def test_a_bucket_in_debt_says_when_it_is_paid() -> None:
    bucket = TokenBucket(60)
    bucket.take(0.0, 160)
    assert bucket.wait_s(0.0) == 101.0
    assert bucket.remaining(0.0) == 0
    assert bucket.wait_s(101.0) == 0.0


def test_the_longest_wait_is_told() -> None:
    quota = Quota(Rates(1, 60))
    assert quota.refusal(0.0) is None
    quota.take_request(0.0)
    quota.take_tokens(0.0, 200)
    assert quota.refusal(0.0) == ("60 tokens per minute", 141.0)
    assert quota.headers(0.0)[1] == (b"x-ratelimit-remaining-requests", b"0")


def test_accounts_are_bounded_and_the_unlimited_have_none() -> None:
    quotas = Quotas()
    assert quotas.of(b"x", Rates()) is None
    first = quotas.of(b"first", Rates(1, 0))
    for number in range(MAX_CALLERS - 1):
        quotas.of(str(number).encode(), Rates(1, 0))
    assert quotas.of(b"first", Rates(1, 0)) is first
    quotas.of(b"one more", Rates(1, 0))
    assert len(quotas) == MAX_CALLERS
    assert quotas.of(b"first", Rates(1, 0)) is first, "the one used longest ago was closed, not this one"


# ---------------------------------------------------------------- the adaptive limit


class Server:
    """Serves `per_s` rows a second, one queue: the wait is what is ahead."""

    def __init__(self, per_s: float) -> None:
        self.per_s, self.queue = per_s, 0.0

    def run(self, limit: AdaptiveLimit, offered_per_s: float, seconds: float, *, least: int, most: int) -> float:
        """Offers a steady load; the average wait over the last quarter."""
        step, now, waits = 0.01, 0.0, []
        credit = 0.0
        while now < seconds:
            now += step
            credit += offered_per_s * step
            while credit >= 1:
                credit -= 1
                if self.queue < limit.limit(least, most):
                    self.queue += 1
            self.queue = max(0.0, self.queue - self.per_s * step)
            wait = self.queue / self.per_s
            limit.waited(wait, int(self.queue), now)
            if now > seconds * 0.75:
                waits.append(wait)
        return sum(waits) / len(waits)


def test_three_times_the_load_keeps_the_wait_near_the_target() -> None:
    target = 1.0
    assert Server(50).run(AdaptiveLimit(target), 150, 120, least=8, most=4000) < 1.5 * target
    assert Server(50).run(AdaptiveLimit(0.0), 150, 120, least=8, most=4000) > 50 * target, "switched off, all that fit"


def test_the_limit_grows_again_when_the_server_is_faster() -> None:
    limit, server = AdaptiveLimit(0.5), Server(20)
    server.run(limit, 200, 60, least=4, most=4000)
    slow = limit.limit(4, 4000)
    server.per_s = 200
    server.run(limit, 600, 200, least=4, most=4000)
    assert limit.limit(4, 4000) > 3 * slow


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5000), st.floats(0, 10)), max_size=100))
def test_the_limit_stays_within_its_bounds(events: list[tuple[float, int, float]]) -> None:
    limit, now = AdaptiveLimit(2.0), 0.0
    for wait, rows, gap in events:
        now += gap
        limit.waited(wait, rows, now)
        assert 16 <= limit.limit(16, 320) <= 320

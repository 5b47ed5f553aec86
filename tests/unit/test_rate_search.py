"""The search for the highest rate: any threshold is found within 5 %, and whatever the verdicts are, it ends."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trireme.launch.bench.highest_rate import HIGHEST_RATE, Goal, conclusion, search_from
from trireme.launch.bench.rate_search import WITHIN, RateSearch
from trireme.launch.bench.slo import Slo

LOWEST, HIGHEST = 1e-3, 1e4
MOST_TRIALS = (
    math.ceil(math.log2(HIGHEST / LOWEST)) + 1 + 5
)  # from one end to the other, then bisection of a factor of 2
rates = st.floats(math.log(LOWEST), math.log(HIGHEST)).map(lambda log: min(max(math.exp(log), LOWEST), HIGHEST))


def tried(search: RateSearch, passes: Callable[[float], bool]) -> list[float]:
    """The rates asked for until the search is over."""
    asked: list[float] = []
    while search.rate is not None:
        assert len(asked) < MOST_TRIALS
        assert search.passed < search.rate < search.failed
        asked.append(search.rate)
        search.note(is_passed=passes(search.rate))
    return asked


def test_doubling_then_bisection():
    search = RateSearch(1.0, lowest=0.1, highest=100.0)
    assert tried(search, lambda rate: rate <= 5.0) == [1.0, 2.0, 4.0, 8.0, 5.66, 4.76, 5.19, 4.97]
    assert (search.passed, search.failed) == (4.97, 5.19)


def test_halving_where_the_start_fails():
    search = RateSearch(8.0, lowest=1.0, highest=100.0)
    assert tried(search, lambda rate: rate < 3.0) == [8.0, 4.0, 2.0, 2.83, 3.36, 3.08, 2.95]
    assert search.passed == 2.95


def test_both_ends():
    search = RateSearch(8.0, lowest=1.5, highest=20.0)
    assert tried(search, lambda rate: False) == [8.0, 4.0, 2.0, 1.5]
    assert (search.passed, search.failed) == (0.0, 1.5)
    search = RateSearch(8.0, lowest=1.5, highest=20.0)
    assert tried(search, lambda rate: True) == [8.0, 16.0, 20.0]
    assert (search.passed, search.failed) == (20.0, math.inf)


@given(start=rates, threshold=rates, is_inclusive=st.booleans())
@example(start=LOWEST, threshold=HIGHEST, is_inclusive=True)
@example(start=HIGHEST, threshold=LOWEST, is_inclusive=False)
def test_the_threshold_of_any_step_function_is_found(start, threshold, is_inclusive):
    search = RateSearch(start, lowest=LOWEST, highest=HIGHEST)
    asked = tried(search, lambda rate: rate <= threshold if is_inclusive else rate < threshold)
    assert len(set(asked)) == len(asked)
    assert all(LOWEST <= rate <= HIGHEST for rate in asked)
    if search.passed == 0.0:
        assert threshold <= LOWEST
    elif search.failed == math.inf:
        assert search.passed == HIGHEST <= threshold
    else:
        assert search.passed <= threshold <= search.failed <= search.passed * (1 + WITHIN)


@given(start=rates, verdicts=st.lists(st.booleans(), min_size=MOST_TRIALS, max_size=MOST_TRIALS))
def test_it_ends_whatever_the_verdicts(start, verdicts):
    given_ = iter(verdicts)
    search = RateSearch(start, lowest=LOWEST, highest=HIGHEST)
    tried(search, lambda rate: next(given_))
    assert search.passed < search.failed


@given(alone_s=st.floats(0.0, 1e4), start=st.none() | st.floats(1e-6, HIGHEST_RATE))
def test_a_search_begins_with_one_request_in_flight_or_where_it_is_told(alone_s, start):
    search = search_from(alone_s, start)
    assert search.rate == start or (start is None and 0 < search.rate <= HIGHEST_RATE)
    if start is None and alone_s >= 1 / HIGHEST_RATE:
        assert search.rate * alone_s == pytest.approx(1.0, rel=0.01)


def test_the_one_line_that_says_what_was_found():
    goal = Goal(Slo(1000, 50), 0.9)
    search = RateSearch(1.0, lowest=0.5, highest=4.0)
    tried(search, lambda rate: rate < 2.5)
    found = "highest rate that keeps ttft 1 s, itl 50 ms for 90 % of requests: 2.49 requests/s"
    assert conclusion(goal, search) == found
    assert conclusion(goal, search, is_late=True) == found + " or more; these clients cannot send faster"
    search = RateSearch(1.0, lowest=0.5, highest=4.0)
    tried(search, lambda rate: True)
    assert conclusion(goal, search).endswith("90 % of requests: 4 requests/s or more; none higher was tried")
    search = RateSearch(1.0, lowest=0.5, highest=4.0)
    tried(search, lambda rate: False)
    text = "no rate keeps ttft 1 s, itl 50 ms for 90 % of requests: 0.5 requests/s, the lowest tried, does not"
    assert conclusion(goal, search) == text

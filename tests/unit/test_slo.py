"""Objectives of a benchmark: what `--slo` takes, what a refusal names, and which requests are good."""

from __future__ import annotations

import pytest

from trireme.errors import ConfigError
from trireme.launch.bench.slo import Slo, parse_slo


@pytest.mark.parametrize(
    ("text", "slo", "shown"),
    [
        ("ttft=1s,itl=50ms", Slo(1000, 50), "ttft 1 s, itl 50 ms"),
        ("e2e=20s", Slo(e2e_ms=20000), "e2e 20 s"),
        ("itl=12.5ms, ttft=1.5 s", Slo(1500, 12.5), "ttft 1.5 s, itl 12.5 ms"),
        ("itl=.5s", Slo(itl_ms=500), "itl 500 ms"),
    ],
)
def test_objectives(text, slo, shown):
    assert parse_slo(text.split(",")) == slo
    assert str(slo) == shown


def test_no_objectives():
    assert parse_slo(()) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpot=50ms", "no objective 'tpot'.*it takes ttft, itl, e2e"),
        ("tfft=1s", "did you mean ttft"),
        ("", "no objective ''"),
        ("ttft=1s,ttft=2s", "names ttft twice"),
        ("itl", "itl has no value; it must be a time with its unit, ms or s, above 0 and at most a day"),
        *(
            (f"itl={value}", f"itl is '{value}'; it must be a time")
            for value in ("", "50", "50us", "0ms", "-1s", "1e3s", "nans", "100000s", "1s2ms")
        ),
    ],
)
def test_a_refusal_names_the_objective_the_value_and_what_is_allowed(text, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_slo(text.split(","))
    assert caught.value.hint == "--slo ttft=1s,itl=50ms"


def test_a_request_is_judged_by_its_own_p99_gap():
    """1001 gaps of 10 ms, some of them 200: ten of these are allowed, as the p99 has exactly ten above it."""
    for num_long, is_good in ((0, True), (10, True), (11, False)):
        gaps_s = [0.01] * (1001 - num_long) + [0.2] * num_long
        times_s = [0.5]
        for gap_s in gaps_s:
            times_s.append(times_s[-1] + gap_s)
        assert Slo(itl_ms=50).is_kept(0.0, times_s) is is_good
        mean_ms = sum(gaps_s) / len(gaps_s) * 1e3
        assert mean_ms < 50


def test_bounds_are_inclusive_and_each_counts_alone():
    times_s = (0.5, 0.75, 1.0)
    assert Slo(500, 250, 1000).is_kept(0.0, times_s)
    for slo in (Slo(ttft_ms=499), Slo(itl_ms=249), Slo(e2e_ms=999)):
        assert not slo.is_kept(0.0, times_s)
    assert Slo(itl_ms=1).is_kept(0.0, (0.5,))
    assert not Slo(itl_ms=1).is_kept(0.0, ())

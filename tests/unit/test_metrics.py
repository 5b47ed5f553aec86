"""The metric table's own rules, and percentiles against the standard library's."""

from __future__ import annotations

import math
import re
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.metrics import BY_NAME, METRICS, percentile


def test_names_are_unique_and_have_their_unit():
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"trireme_[a-z_]+", metric.name)
        assert not metric.name.endswith(("_total", "_info")), "the exporter adds the ending"
        assert metric.help
        assert metric.help[0].islower() or metric.help[0].isdigit() or metric.help.startswith(("HTTP", "KV"))
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        if metric.kind == "histogram" and metric.buckets[0] < 1:
            assert metric.name.endswith("_seconds")


def test_exported_names():
    assert BY_NAME["trireme_preemptions"].exported == "trireme_preemptions_total"
    assert BY_NAME["trireme_requests_running"].exported == "trireme_requests_running"


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_percentiles_agree_with_inclusive_quantiles(values):
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1], abs=1e-6)


def test_percentiles_of_one_and_of_none():
    assert percentile([3.0], 99) == 3.0
    assert math.isnan(percentile([], 50))

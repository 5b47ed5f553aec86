"""What a front end counts, and how all of it becomes one Prometheus page.

The hot path adds to plain numbers (one loop, no locks). At a scrape one front end collects the snapshots of its siblings
(serving/metrics/aggregation.py) and the statistics of the engines, so that any of them gives the same, whole answer. At every quiet
point received = complete + error + cancelled, and streams_open is 0.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from trireme.metrics import BY_NAME
from trireme.metrics import Metric as Described
from trireme.serving.engines.engine import EngineState
from trireme.serving.http.sse import Outcome
from trireme.serving.text.generation import Generation

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()


class Histogram(msgspec.Struct):
    """Counts per bucket, the last one for values above every bound."""

    buckets: list[int]
    total: float = 0.0


class Snapshot(msgspec.Struct):
    """All numbers of one front end. Keys of counters are `name` or `name|label value`."""

    counters: dict[str, float]
    gauges: dict[str, float]
    histograms: dict[str, Histogram]


_HISTOGRAMS = [metric for metric in BY_NAME.values() if metric.kind == "histogram"]


class Telemetry:
    """Numbers of this front end."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        for outcome in ("complete", "error", "cancelled"):
            self.counters[f"trireme_requests|{outcome}"] = 0.0
        for name in ("trireme_prompt_tokens", "trireme_cached_tokens", "trireme_generation_tokens"):
            self.counters[name] = 0.0
        self.counters["trireme_slow_readers"] = self.counters["trireme_slow_readers_reset"] = 0.0
        self.open = 0
        self._histograms = {metric.name: Histogram([0] * (len(metric.buckets) + 1)) for metric in _HISTOGRAMS}

    def count(self, name: str, value: float = 1.0) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value

    def observe(self, name: str, value: float, times: int = 1) -> None:
        histogram = self._histograms[name]
        histogram.buckets[bisect_left(BY_NAME[name].buckets, value)] += times
        histogram.total += value * times

    def received(self, route: str, generation: Generation, num_choices: int) -> None:
        """A request was accepted for work; `ended` follows exactly once."""
        self.open += 1
        self.count(f"trireme_requests_received|{route}")
        prompt = generation.usage().prompt_tokens
        self.count("trireme_prompt_tokens", prompt)
        self.observe("trireme_request_prompt_tokens", prompt)
        self.observe("trireme_request_choices", num_choices)

    def ended(self, outcome: Outcome, generation: Generation) -> None:
        """Counts a finished request: outcome, tokens, and latencies in seconds if it got a token."""
        self.open -= 1
        self.count(f"trireme_requests|{outcome}")
        usage = generation.usage()
        self.count("trireme_cached_tokens", usage.cached_tokens)
        self.count("trireme_generation_tokens", usage.completion_tokens)
        self.observe("trireme_request_generation_tokens", usage.completion_tokens)
        self.observe("trireme_request_seconds", time.monotonic() - generation.start)
        if generation.first is None:
            return
        self.observe("trireme_queue_seconds", generation.queued_s)
        self.observe("trireme_prefill_seconds", generation.prefill_s)
        self.observe("trireme_time_to_first_token_seconds", generation.first - generation.start)

    def refused(self, code: str) -> None:
        self.count(f"trireme_requests_refused|{code}")

    def snapshot(
        self, kept_elsewhere: Mapping[str, float] | None = None, histograms: Mapping[str, Histogram] | None = None
    ) -> Snapshot:
        """Numbers for the page, with counters and histograms that others have kept."""
        return Snapshot(
            {**self.counters, **(kept_elsewhere or {})},
            {"trireme_streams_open": self.open},
            {**self._histograms, **(histograms or {})},
        )


def inherited(last: Snapshot) -> Snapshot:
    """What the numbers of a front end that is gone say for ever: the requests it had not ended are lost, and none is open."""
    counters = dict(last.counters)
    received = sum(value for key, value in counters.items() if key.startswith("trireme_requests_received|"))
    ended = sum(value for key, value in counters.items() if key.startswith("trireme_requests|"))
    counters["trireme_requests|error"] = counters.get("trireme_requests|error", 0.0) + max(0.0, received - ended)
    return Snapshot(counters, {}, last.histograms)


def merged(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Sums over front ends."""
    out = Snapshot({}, {}, {metric.name: Histogram([0] * (len(metric.buckets) + 1)) for metric in _HISTOGRAMS})
    for snapshot in snapshots:
        for key, value in snapshot.counters.items():
            out.counters[key] = out.counters.get(key, 0.0) + value
        for key, value in snapshot.gauges.items():
            out.gauges[key] = out.gauges.get(key, 0.0) + value
        for name, histogram in snapshot.histograms.items():
            into = out.histograms[name]
            into.buckets = [a + b for a, b in zip(into.buckets, histogram.buckets, strict=True)]
            into.total += histogram.total
    return out


# ---------------------------------------------------------------- the page

# key of an engine's statistics -> (metric, extra label)
_ENGINE_NUMBERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "num_waiting": ("trireme_requests_waiting", ()),
    "num_running": ("trireme_requests_running", ()),
    "waiting_tokens": ("trireme_waiting_tokens", ()),
    "running_tokens": ("trireme_running_tokens", ()),
    "oldest_wait_s": ("trireme_queue_age_seconds", ()),
    "steps": ("trireme_engine_steps", ()),
    "bounded_steps": ("trireme_bounded_steps", ()),
    "late_steps": ("trireme_late_steps", ()),
    "step_time_error": ("trireme_step_time_error", ("0.5",)),
    "step_time_error_p95": ("trireme_step_time_error", ("0.95",)),
    "step_time_level": ("trireme_step_time_level", ()),
    "itl_target_s": ("trireme_itl_target_seconds", ()),
    "preemptions": ("trireme_preemptions", ()),
    "returned": ("trireme_rows_given_back", ()),
    "graphs_captured": ("trireme_graphs_captured", ()),
    "graphs_dropped": ("trireme_graphs_dropped", ()),
    "graph_replays": ("trireme_graph_replays", ()),
    "graph_padded_rows": ("trireme_graph_padded_rows", ()),
    "graph_bytes": ("trireme_graph_bytes", ()),
    "prefix_queries": ("trireme_prefix_queries", ()),
    "prefix_hits": ("trireme_prefix_hits", ()),
    "blocks_owned": ("trireme_kv_blocks", ("owned",)),
    "blocks_cached": ("trireme_kv_blocks", ("cached",)),
    "blocks_free": ("trireme_kv_blocks", ("free",)),
}


ENGINE_COUNTERS = frozenset(key for key, (name, _) in _ENGINE_NUMBERS.items() if BY_NAME[name].kind == "counter")
"""Keys of an engine's statistics that count from its start."""


def page(
    front_ends: Snapshot,
    engines: Sequence[EngineState],
    statistics: Mapping[int, Mapping[str, Any]],
    build: Mapping[str, str],
) -> bytes:
    """The Prometheus text page. `statistics` are the engines' answers, by engine; an engine may be missing."""
    registry = CollectorRegistry()
    registry.register(_Page(front_ends, engines, statistics, build))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(
        self,
        front_ends: Snapshot,
        engines: Sequence[EngineState],
        statistics: Mapping[int, Mapping[str, Any]],
        build: Mapping[str, str],
    ) -> None:
        self._families: dict[str, Metric] = {}
        for key, value in {**front_ends.counters, **front_ends.gauges}.items():
            name, *labels = key.split("|", 1)
            self._add(name, labels, value)
        for name, histogram in front_ends.histograms.items():
            self._add_histogram(BY_NAME[name], histogram)
        for state in engines:
            label = str(state.engine)
            self._add("trireme_engine_up", [label], float(state.is_up))
            if state.is_up:
                self._add("trireme_engine_epoch", [label], state.epoch)
            for key, value in statistics.get(state.engine, {}).items():
                if (target := _ENGINE_NUMBERS.get(key)) is not None:
                    self._add(target[0], [label, *target[1]], float(value))
        info = InfoMetricFamily("trireme_build", BY_NAME["trireme_build"].help)
        info.add_metric([], dict(build))
        self._families["trireme_build"] = info

    def collect(self) -> Iterable[Metric]:
        return list(self._families.values())

    def _add(self, name: str, labels: list[str], value: float) -> None:
        described = BY_NAME[name]
        family = self._families.get(name)
        if family is None:
            kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
            family = self._families[name] = kind(name, described.help, labels=described.labels)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)

    def _add_histogram(self, described: Described, histogram: Histogram) -> None:
        family = HistogramMetricFamily(described.name, described.help)
        running, buckets = 0, []
        for bound, count in zip([*map(str, described.buckets), "+Inf"], histogram.buckets, strict=True):
            running += count
            buckets.append((bound, running))
        family.add_metric([], buckets, histogram.total)
        self._families[described.name] = family

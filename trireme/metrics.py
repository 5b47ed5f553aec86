"""The one metric table: name, kind, labels, help. Frontends export it (serving/metrics/telemetry.py), docs/metrics.md lists it.

Nothing else names a metric. Times are seconds, sizes bytes; a counter's exported name ends in `_total`. Percentiles for
benchmarks and reports are computed here as well, so that every number in the project means the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """`decisive` marks the few metrics that tell whether the service is healthy. `buckets` are upper bounds, for histograms."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    decisive: bool = False

    @property
    def exported(self) -> str:
        """The name as a scraper sees it."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
# fine where a reader notices: from 5 to 300 ms a bound is at most 1.6 times the one before
_GAPS_MS = (1, 2, 5, 8, 12, 16, 20, 25, 35, 50, 70, 100, 150, 200, 300, 500, 1000, 2000, 5000)
_GAPS = tuple(ms / 1000 for ms in _GAPS_MS)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

METRICS: tuple[Metric, ...] = (
    # request lifecycle, in order
    Metric("trireme_requests", "counter", "requests that ended, by how they ended", ("outcome",), decisive=True),
    Metric("trireme_requests_received", "counter", "requests accepted for work", ("route",)),
    Metric("trireme_requests_refused", "counter", "requests refused, by error code", ("code",), decisive=True),
    Metric("trireme_requests_waiting", "gauge", "sequences queued in an engine", ("engine",), decisive=True),
    Metric("trireme_requests_running", "gauge", "sequences in each step of an engine", ("engine",), decisive=True),
    Metric("trireme_queue_seconds", "histogram", "time from submit to the first scheduled token", (), _SECONDS),
    Metric("trireme_prefill_seconds", "histogram", "time from scheduling to the first token", (), _SECONDS),
    Metric("trireme_time_to_first_token_seconds", "histogram", "time from arrival to first token", (), _SECONDS, True),
    Metric("trireme_inter_token_seconds", "histogram", "each gap between tokens of one choice", (), _GAPS, True),
    Metric("trireme_request_seconds", "histogram", "time from arrival to the last byte", (), _SECONDS),
    Metric("trireme_prompt_tokens", "counter", "prompt tokens of accepted requests"),
    Metric("trireme_cached_tokens", "counter", "prompt tokens found in the prefix cache"),
    Metric("trireme_generation_tokens", "counter", "tokens generated", (), decisive=True),
    Metric("trireme_request_prompt_tokens", "histogram", "prompt tokens per request", (), _TOKENS),
    Metric("trireme_request_generation_tokens", "histogram", "generated tokens per request", (), _TOKENS),
    Metric("trireme_request_choices", "histogram", "choices per request", (), _SIZES),
    # engines
    Metric("trireme_engine_up", "gauge", "1 while an engine answers", ("engine",), decisive=True),
    Metric("trireme_engine_epoch", "gauge", "life number of an engine; rises by one with each restart", ("engine",)),
    Metric("trireme_engine_steps", "counter", "steps completed", ("engine",)),
    Metric("trireme_itl_target_seconds", "gauge", "time between tokens that prompts leave to streams", ("engine",)),
    Metric("trireme_bounded_steps", "counter", "steps with prompt tokens cut to keep that target", ("engine",)),
    Metric("trireme_late_steps", "counter", "of these, steps that took longer than planned", ("engine",)),
    Metric(
        "trireme_step_time_error",
        "gauge",
        "relative error of the latest step times as predicted, by quantile",
        ("engine", "quantile"),
    ),
    Metric("trireme_step_time_level", "gauge", "current step times, relative to those learned", ("engine",)),
    Metric("trireme_waiting_tokens", "gauge", "prompt tokens queued", ("engine",)),
    Metric("trireme_running_tokens", "gauge", "tokens held by running sequences", ("engine",)),
    Metric("trireme_queue_age_seconds", "gauge", "wait of the oldest queued sequence so far", ("engine",)),
    Metric("trireme_kv_blocks", "gauge", "KV blocks by state: owned, cached, free", ("engine", "state"), decisive=True),
    Metric("trireme_prefix_queries", "counter", "prompt tokens looked up in the prefix cache", ("engine",)),
    Metric("trireme_prefix_hits", "counter", "prompt tokens found in the prefix cache", ("engine",)),
    Metric("trireme_preemptions", "counter", "sequences that lost their blocks and were recomputed", ("engine",)),
    Metric("trireme_rows_given_back", "counter", "waiting sequences that left for an engine with room", ("engine",)),
    Metric("trireme_graphs_captured", "counter", "sizes of steps that were captured as CUDA graphs", ("engine",)),
    Metric("trireme_graphs_dropped", "counter", "captured sizes that were dropped", ("engine",)),
    Metric("trireme_graph_replays", "counter", "steps that replayed a CUDA graph", ("engine",)),
    Metric("trireme_graph_padded_rows", "counter", "sequences computed for nobody, to fill a graph", ("engine",)),
    Metric("trireme_graph_bytes", "gauge", "memory of a GPU that CUDA graphs hold", ("engine",)),
    # frontends and the wire
    Metric("trireme_streams_open", "gauge", "HTTP requests being answered"),
    Metric("trireme_slow_readers", "counter", "streams ended because their reader lagged too far behind"),
    Metric("trireme_slow_readers_reset", "counter", "of these, connections reset because they took nothing any more"),
    Metric("trireme_routing_fallbacks", "counter", "engines chosen without the coordinator"),
    Metric("trireme_moves", "counter", "choices that went on elsewhere after they had lost their engine"),
    Metric("trireme_quarantined", "counter", "choices that were running on two engines when these died", decisive=True),
    Metric(
        "trireme_frames_malformed",
        "counter",
        "messages that arrived altered or made no sense, which ends a connection",
        ("source",),
    ),
    Metric(
        "trireme_messages_dropped",
        "counter",
        "messages that were missing when a later one came, which ends a connection",
        ("source",),
    ),
    Metric("trireme_build", "info", "version and configuration", ("version", "model")),
)

BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks; NaN when there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

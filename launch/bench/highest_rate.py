"""`trireme bench sweep --slo`: the highest rate of open-loop (Poisson) arrivals at which enough requests keep the objectives.

This is goodput as DistServe (OSDI 2024) defines it. First a few requests one at a time: the rate to start from is one request in
flight on average. Each rate is then applied as launch/bench/load.py does; launch/bench/rate_search.py says which. Figures go to
stderr while it runs, since that takes minutes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from trireme.launch.api.http import ServerError
from trireme.launch.api.view import ProgressView
from trireme.launch.bench.load import RATE_S, Applied, LoadPoint, RequestShape, Target, Workload, apply
from trireme.launch.bench.rate_search import RateSearch, rounded
from trireme.launch.bench.samples import RunSummary, Sample, report_errors, shown_figure, summarize
from trireme.launch.bench.slo import Slo
from trireme.launch.terminal import show
from trireme.metrics import percentile

NUM_ALONE = 4  # requests one at a time, before the search
LEAST_REQUESTS = 20  # at a rate; fewer say little of a share
WINDOWS = 4.0  # arrivals last at least so many times as long as a request alone, so that load can build up
LIGHTEST = 0.125  # requests in flight on average; a server that fails at this rate would fail at any
HIGHEST_RATE = 10_000.0  # requests per second


class Goal(NamedTuple):
    """What a rate must keep: the objectives, for this share of requests."""

    slo: Slo
    attainment: float

    def __str__(self) -> str:
        return f"{self.slo} for {self.attainment * 100:g} % of requests"


class Found(NamedTuple):
    """What a search found on one server. `rate` is 0.0 where none keeps the goal; `conclusion` is the one line that says it."""

    rows: list[RunSummary]
    rate: float
    conclusion: str


async def find_highest(target: Target, goal: Goal, options: dict[str, Any], *, prefix: str = "") -> Found:
    """Searches from `options["rate"]`, or from an estimate. `prefix` stands before the names of rows. Raises ServerError when not
    even a request alone succeeds."""
    trials = _Trials(target, goal, options, prefix)
    alone, samples = await trials.alone()
    if alone.figures["attainment"] == 0.0:
        return Found([alone], 0.0, f"no rate keeps {goal}: not even one request at a time does")
    alone_s = percentile([s.times[-1] - s.sent for s in samples if not s.error and s.times], 50)
    search = search_from(alone_s, float(options["rate"][0]) if options["rate"] else None)
    rows, late_rate = [], math.inf
    while search.rate is not None:
        row, is_late = await trials.at(search.rate, max(RATE_S, WINDOWS * alone_s))
        rows.append(row)
        late_rate = min(late_rate, search.rate) if is_late else late_rate
        search.note(is_passed=not is_late and row.figures["attainment"] >= goal.attainment)
    rows.sort(key=lambda row: row.figures["rate"])
    return Found(rows, search.passed, conclusion(goal, search, is_late=late_rate == search.failed))


def search_from(alone_s: float, start: float | None) -> RateSearch:
    """A search on a server that takes `alone_s` for a request alone. Without a `start` it begins with one request in flight on
    average (by Little's law, the rate times `alone_s`)."""
    one_in_flight = rounded(min(HIGHEST_RATE, 1 / max(alone_s, 1 / HIGHEST_RATE)))
    first = start or one_in_flight
    return RateSearch(first, lowest=min(first, one_in_flight) * LIGHTEST, highest=HIGHEST_RATE)


def conclusion(goal: Goal, search: RateSearch, *, is_late: bool = False) -> str:
    """What a search that is over has found, in one line. `is_late`: the lowest rate that failed did so for the clients' sake."""
    if search.passed == 0.0:
        return f"no rate keeps {goal}: {search.failed:.3g} requests/s, the lowest tried, does not"
    limit = ""
    if search.failed == math.inf:
        limit = " or more; none higher was tried"
    elif is_late:
        limit = " or more; these clients cannot send faster"
    return f"highest rate that keeps {goal}: {search.passed:.3g} requests/s{limit}"


class _Trials:
    """Loads on one server, each shown on stderr while it runs and after it, on a terminal or not."""

    def __init__(self, target: Target, goal: Goal, options: dict[str, Any], prefix: str) -> None:
        self._target, self._goal, self._prefix = target, goal, prefix
        self._shape = RequestShape(options["input_len"], options["output_len"])
        self._count, self._repeats = options["num_requests"], options["repeats"]

    async def alone(self) -> tuple[RunSummary, list[Sample]]:
        """A few requests, one at a time. Raises ServerError when none succeeds."""
        point = LoadPoint("clients", 1)
        applied = await self._apply(point, NUM_ALONE)
        row = self._row(point, [applied])
        if row.figures["errors"] == row.figures["requests"]:
            raise ServerError(f"no request succeeds: {applied.samples[0].error}")
        return row, applied.samples

    async def at(self, rate: float, window_s: float) -> tuple[RunSummary, bool]:
        """All repeats of a rate as one row, and whether the clients were too slow for it."""
        point = LoadPoint("rate", rate)
        count = self._count or max(LEAST_REQUESTS, round(window_s * rate))
        found = [await self._apply(point, count, repeat) for repeat in range(self._repeats)]
        row = self._row(point, found)
        if is_late := any(applied.is_late for applied in found):
            show(f"  these clients cannot send {rate:g} requests/s, which counts as a miss", to=sys.stderr)
        return row, is_late

    async def _apply(self, point: LoadPoint, count: int, repeat: int = 0) -> Applied:
        load = Workload(point, self._shape, count, repeat)
        return await apply(self._target, load, ProgressView(True), self._prefix + point.name)

    def _row(self, point: LoadPoint, found: Sequence[Applied]) -> RunSummary:
        samples = [sample for applied in found for sample in applied.samples]
        figures = summarize(samples, sum(applied.wall_s for applied in found), self._goal.slo)
        row = RunSummary(self._prefix + point.name, {point.what: point.amount, **figures}, self._target.name)
        report_errors(samples)
        verdict = "kept" if figures["attainment"] >= self._goal.attainment else "missed"
        good = f"{verdict:<6}  {figures['attainment'] * 100:.3g} % of {figures['requests']:.0f} requests good"
        times = "   ".join(f"{key} {shown_figure(figures[key])}" for key in ("ttft_p99_ms", "itl_p99_ms"))
        show(f"  {row.name:<12} {good}   {times}", to=sys.stderr)
        return row

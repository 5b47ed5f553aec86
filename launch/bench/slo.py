"""Service-level objectives of a benchmark: what a request keeps to be good. Read from `--slo ttft=1s,itl=50ms,e2e=20s`.

A request is good when it ended without an error and kept every objective named: its first token came within `ttft`, the 99th
percentile of its own gaps between tokens is within `itl`, its last token came within `e2e`; `ttft` and `e2e` count from when it was
sent. Of the gaps it is the request's p99: their mean (TPOT, by which other benchmarks judge) hides a stall, as one of 1 s among 100
tokens adds 10 ms to it, and of their largest one hiccup in a thousand tokens would decide. Up to 100 gaps the p99 lies between the
two largest. Goodput is good requests per second of wall time, attainment their share of all requests, failed ones included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trireme.errors import ConfigError
from trireme.metrics import percentile
from trireme.settings import nearest
from trireme.sizes import format_seconds, parse_seconds

EXAMPLE = "--slo ttft=1s,itl=50ms"


class Slo(NamedTuple):
    """Objectives in milliseconds; None: any time will do."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None

    def __str__(self) -> str:
        """`ttft 1 s, itl 50 ms`."""
        named = zip(NAMES, self, strict=True)
        return ", ".join(f"{name} {format_seconds(limit / 1e3)}" for name, limit in named if limit is not None)

    def is_kept(self, sent_s: float, times_s: Sequence[float]) -> bool:
        """Whether a request without an error is good, from when it was sent and when each token came. One of a single token has no
        gap and keeps every `itl`; one without a token is never good."""
        if not times_s:
            return False
        gaps_s = [b - a for a, b in zip(times_s, times_s[1:], strict=False)]
        found_s = (times_s[0] - sent_s, percentile(gaps_s, 99), times_s[-1] - sent_s)
        pairs = zip(found_s, self, strict=True)
        return all(limit is None or math.isnan(value) or value * 1e3 <= limit for value, limit in pairs)


NAMES = tuple(field.removesuffix("_ms") for field in Slo._fields)


def parse_slo(words: Sequence[str]) -> Slo | None:
    """Objectives from `name=duration` words; None when there are none. Raises ConfigError, which names the objective, the value and
    what is allowed."""
    found: dict[str, float] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in NAMES:
            raise ConfigError(
                f"--slo has no objective {name!r}{nearest(name, NAMES)}; it takes {', '.join(NAMES)}", hint=EXAMPLE
            )
        if name in found:
            raise ConfigError(f"--slo names {name} twice", hint=EXAMPLE)
        milliseconds = _milliseconds(value)
        if milliseconds is None:
            what = f"{name} is {value!r}" if equals else f"{name} has no value"
            raise ConfigError(
                f"--slo: {what}; it must be a time with its unit, ms or s, above 0 and at most a day", hint=EXAMPLE
            )
        found[name] = milliseconds
    return Slo(**{f"{name}_ms": limit for name, limit in found.items()}) if found else None


def _milliseconds(text: str) -> float | None:
    """`1.5s`, `50ms`; None for anything else, and for a number without a unit."""
    try:
        return parse_seconds(text) * 1e3 if text.endswith("s") else None
    except ValueError:
        return None

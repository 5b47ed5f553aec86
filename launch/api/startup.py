"""Startup breakdown: from the launch of a command to an engine that answers, in parts that add up to the wall time.

Every process times its own start (trireme/phases.py); here the parts of the launcher, of the last engine to be ready, and of the
processes that waited for it are concatenated. Timestamps are readings of time.monotonic, which processes of one machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from trireme.transport.wire.messages import Ready

SHOWN_S = 0.005  # shorter parts are omitted from the line, not from the sum
LONGEST_S = 3600.0


class Life(NamedTuple):
    """The start of one engine. `born`: its process was ordered; `began`: its first instruction; then its own parts."""

    born: float
    began: float
    seconds: Mapping[str, float]


def process_began() -> float:
    """When this process was started, to a hundredth of a second; the current time where the system does not tell."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0.0 <= age <= LONGEST_S else now


def breakdown(launched: float, engines: Mapping[str, Life], ready: float, rest: str) -> dict[str, float]:
    """Seconds from `launched` to `ready`, by part; `rest` names the time after the engines were ready."""
    if not engines:
        return {rest: ready - launched}
    last = max(engines.values(), key=lambda life: life.began + sum(life.seconds.values()))
    parts = {"launcher": last.born - launched, "process": last.began - last.born}
    for name, seconds in last.seconds.items():
        parts[name] = parts.get(name, 0.0) + seconds
    parts[rest] = parts.get(rest, 0.0) + ready - last.began - sum(last.seconds.values())
    return parts


def lives_of(parts: Mapping[str, Ready], born_at: Mapping[str, float]) -> dict[str, Life]:
    """Startup of each engine of a deployment, from its Ready."""
    engines = {name: ready for name, ready in parts.items() if name.startswith("engine")}
    return {name: Life(born_at.get(name, ready.began), ready.began, ready.phases) for name, ready in engines.items()}


def line_of(parts: Mapping[str, float]) -> str:
    """`launcher 0.31  import 0.42  weights 1.80`, in seconds."""
    return "  ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= SHOWN_S)

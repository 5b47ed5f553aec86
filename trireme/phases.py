"""Startup timing: consecutive named phases whose seconds add up to the whole interval. Pure but for the clock.

Each process times its own start (BootChannel.phases); one that waits for another includes the phases of that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Phases:
    """`began` is a clock reading, now by default."""

    def __init__(self, began: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.began = clock() if began is None else began
        self._last = self.began
        self.seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Attributes the time since the last `end` to `name`; a name may be used again."""
        now = self._clock()
        self._add(name, now - self._last)
        self._last = now

    def include(self, parts: Mapping[str, float], rest: str) -> None:
        """Attributes the time since the last `end` to `parts`, measured elsewhere, and the remainder to `rest`."""
        now = self._clock()
        for name, seconds in parts.items():
            self._add(name, seconds)
        self._add(rest, max(0.0, now - self._last - sum(parts.values())))
        self._last = now

    def _add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


def slowest(parts: list[Mapping[str, float]]) -> Mapping[str, float]:
    """Of processes that began together, the phases of the slowest: the one that the others waited for."""
    return max(parts, key=lambda part: sum(part.values()), default={})


PART = "part."

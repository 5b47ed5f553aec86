"""How many choices may be under way at once: a limit that follows how long they wait in the engines' queues.

Used by serving/admission/admission.py. Pure: the time is an argument. Additive increase, multiplicative decrease (Chiu and
Jain, 1989), as in Netflix's concurrency-limits (AIMDLimit), with the wait in the queue as the sign of congestion: it is what a
caller feels, and an engine that works at its best has a short queue, not an empty one.
"""

from __future__ import annotations

from typing import Protocol

DECREASE = 0.9
QUIET_S = 0.1  # between two decreases at least: what was let in before the last one says nothing new


class Cell(Protocol):
    """Where the limit is kept, maybe for several processes: (limit, time of the last decrease), 0: none yet. Who writes
    between another one's load and store undoes one small change."""

    def load(self) -> tuple[float, float]: ...

    def store(self, limit: float, lowered_at: float) -> None: ...


class OwnCell:
    """For one process."""

    def __init__(self) -> None:
        self._state = (0.0, 0.0)

    def load(self) -> tuple[float, float]:
        return self._state

    def store(self, limit: float, lowered_at: float) -> None:
        self._state = (limit, lowered_at)


class AdaptiveLimit:
    """Between `least` and whatever `most` the engines can run and queue; starts at the top. `target_s` 0 switches it off. All that
    have the same `cell` have the same limit, and learn together."""

    def __init__(self, target_s: float, cell: Cell | None = None) -> None:
        self.target_s = target_s
        self._cell = cell or OwnCell()

    def limit(self, least: int, most: int) -> int:
        """The number of choices that may be in flight, between `least` and `most`; `most` without a target."""
        if not self.target_s:
            return most
        known, lowered_at = self._cell.load()
        limit = min(float(most), max(float(least), known or float("inf")))
        if limit != known:
            self._cell.store(limit, lowered_at)
        return int(limit)

    def waited(self, wait_s: float, num_rows: int, now: float) -> None:
        """A choice got its first step after `wait_s` in the queue, when `num_rows` were under way."""
        if not self.target_s:
            return
        limit, lowered_at = self._cell.load()
        if wait_s > self.target_s:
            if not lowered_at or now - lowered_at >= max(QUIET_S, self.target_s):
                self._cell.store(DECREASE * min(limit or float("inf"), max(1, num_rows)), now)
        elif limit and 2 * num_rows >= limit:  # a limit that nobody feels learns nothing
            self._cell.store(limit + max(1.0, num_rows / 16) / max(1.0, limit), lowered_at)

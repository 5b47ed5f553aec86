"""How many choices may be under way at once: a limit that follows how long they wait in the engines' queues.

Used by serving/admission/admission.py. Pure: the time is an argument. Additive increase, multiplicative decrease (Chiu and
Jain, 1989), as in Netflix's concurrency-limits (AIMDLimit), with the wait in the queue as the sign of congestion: it is what a
caller feels, and an engine that works at its best has a short queue, not an empty one.
"""

from __future__ import annotations

DECREASE = 0.9
QUIET_S = 0.1  # between two decreases at least: what was let in before the last one says nothing new


class AdaptiveLimit:
    """Between `least` and whatever `most` the engines can run and queue; starts at the top. `target_s` 0 switches it off."""

    def __init__(self, target_s: float) -> None:
        self.target_s = target_s
        self._limit = float("inf")
        self._decreased = float("-inf")

    def limit(self, least: int, most: int) -> int:
        if not self.target_s:
            return most
        self._limit = min(float(most), max(float(least), self._limit))
        return int(self._limit)

    def waited(self, wait_s: float, num_rows: int, now: float) -> None:
        """A choice got its first step after `wait_s` in the queue, when `num_rows` were under way."""
        if not self.target_s:
            return
        if wait_s > self.target_s:
            if now - self._decreased >= max(QUIET_S, self.target_s):
                self._decreased = now
                self._limit = DECREASE * min(self._limit, num_rows)
        elif 2 * num_rows >= self._limit:  # a limit that nobody feels learns nothing
            self._limit += max(1.0, num_rows / 16) / max(1.0, self._limit)

"""When a dead part may be restarted: exponential back-off, and a limit on restarts in a window.

Pure (time is passed in). Used by supervisor.py, one object per part.
"""

from __future__ import annotations

from collections import deque

import msgspec


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Back-off doubles from `first_s` to `longest_s`; at most `most` restarts within `window_s` (None: any number). A part that
    died after being ready for `steady_s` starts afresh."""

    first_s: float = 1.0
    longest_s: float = 60.0
    most: int | None = 5
    window_s: float = 600.0
    steady_s: float = float("inf")


COORDINATOR_LIMITS = RestartLimits(first_s=0.05, most=None, steady_s=1.0)
"""Without state to load or lose, and needed by all other parts: it is restarted forever."""


class Restarts:
    """Deaths of one part within the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._deaths: deque[float] = deque()

    def note_death(self, now: float, ready_s: float = 0.0, *, counts: bool = True) -> float | None:
        """Seconds to wait before the next start, or None when the part must stay down. `ready_s`: how long it had been ready. A
        death that does not count (`counts`) had an external cause, and is retried for as long as that lasts."""
        if not counts:
            return self.limits.longest_s
        if ready_s >= self.limits.steady_s:
            self._deaths.clear()
        while self._deaths and now - self._deaths[0] > self.limits.window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        if self.limits.most is not None and len(self._deaths) > self.limits.most:
            return None
        doubled: float = self.limits.first_s * 2.0 ** min(len(self._deaths) - 1, 32)
        return min(self.limits.longest_s, doubled)

    @property
    def num_recent(self) -> int:
        return len(self._deaths)

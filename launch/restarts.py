"""When a dead part may be started again: exponential back-off, and a bound on restarts in a window.

Pure (time is passed in). Used by supervise.py, one object per part.
"""

from __future__ import annotations

from collections import deque

import msgspec


class RestartLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Back-off doubles from `first_s` to `longest_s`; `most` restarts within `window_s`, then no more."""

    first_s: float = 1.0
    longest_s: float = 60.0
    most: int = 5
    window_s: float = 600.0


class Restarts:
    """Deaths of one part within the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._deaths: deque[float] = deque()

    def note_death(self, now: float) -> float | None:
        """Seconds to wait before the next start, or None when the part must stay down."""
        while self._deaths and now - self._deaths[0] > self.limits.window_s:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self.limits.most:
            return None
        doubled: float = self.limits.first_s * 2.0 ** (len(self._deaths) - 1)
        return min(self.limits.longest_s, doubled)

    @property
    def num_recent(self) -> int:
        return len(self._deaths)

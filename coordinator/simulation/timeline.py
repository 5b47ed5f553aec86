"""Virtual time: a timeline of events, and processes that run on it, each with its own clock.

Owned by one simulated world. One thread; nothing here reads a real clock, and events at equal times keep their order of insertion.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

NEVER = float("inf")
TURN_S = 1e-6  # least duration of an iteration: a rounded due time would otherwise be retried forever


class Timeline:
    """A heap of future events. `now` is the world's time in seconds; no process can see it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._order = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, when: float, act: Callable[..., object], *args: Any) -> None:
        """Calls `act(*args)` at `when`, or now if that is past."""
        self._order += 1
        heappush(self._heap, (when if when > self.now else self.now, self._order, act, args))

    def after(self, delay_s: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now + delay_s, act, *args)

    def run(self, until: float, *, most: int, is_over: Callable[[], bool] | None = None) -> bool:
        """Runs events up to `until`, or until `is_over`; False when `most` events were not enough: the world livelocks."""
        heap = self._heap
        for _ in range(most):
            if not heap or heap[0][0] > until:
                self.now = max(self.now, until)
                return True
            if is_over is not None and is_over():
                return True
            self.now, _, act, args = heappop(heap)
            self.num_events += 1
            act(*args)
        return False


class Process:
    """A process with a main loop. `turn` runs one iteration and returns the seconds until the next one by itself.

    A process may be frozen (it does nothing, and arrivals wait), dead (for good: its next life is another Process), and its
    clock may jump ahead as after a machine's suspend.
    """

    def __init__(self, timeline: Timeline, name: str, epoch: int, *, clock_at: float = 0.0) -> None:
        self.timeline = timeline
        self.name = name
        self.epoch = epoch
        self.is_alive = True
        self.frozen_until = 0.0
        self.frozen_from = NEVER
        self.has_lost_time = False  # it was frozen, or its clock has jumped
        self.leaps: list[float] = []  # seconds by which its clock has jumped
        self.turn: Callable[[], float] = lambda: NEVER
        self._ahead_s = clock_at - timeline.now
        self._due = NEVER

    @property
    def is_frozen(self) -> bool:
        return self.timeline.now < self.frozen_until

    def clock(self) -> float:
        """The time as this process sees it."""
        return self.timeline.now + self._ahead_s

    def jump(self, seconds: float) -> None:
        """Its clock jumps ahead."""
        self._ahead_s += seconds
        self.leaps.append(seconds)
        self.has_lost_time = True
        self.wake()

    def wake(self, delay_s: float = 0.0) -> None:
        """Schedules an iteration in `delay_s`, unless one is due sooner."""
        due = self.timeline.now + delay_s
        if due < self._due:
            self._due = due
            self.timeline.at(due, self._fire, due)

    def freeze(self, seconds: float) -> None:
        self.has_lost_time = True
        if not self.is_frozen:
            self.frozen_from = self.timeline.now
        self.frozen_until = max(self.frozen_until, self.timeline.now + seconds)

    def kill(self) -> None:
        self.is_alive = False

    def _fire(self, due: float) -> None:
        if due != self._due:
            return
        self._due = NEVER
        if not self.is_alive:
            return
        if self.is_frozen:
            if self.frozen_until < NEVER:
                self.wake(self.frozen_until - self.timeline.now)
            return
        delay_s = self.turn()
        if delay_s < NEVER and self.is_alive:
            self.wake(max(delay_s, TURN_S))

"""A thread that aborts collectives when a GPU step waits too long for another rank.

Owned by workers.collectives.cuda.CudaGroup. It watches the age of the oldest step in flight and the failures that the communicators
report; then it aborts them once, so that threads waiting for the device continue and find `reason`. Time in which a rank of the
engine was runnable but had no processor is not counted.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_S = 12.0  # a step that has not ended by now waits for a rank that will not come
LOOK_S = 0.25
YOUNG_S = 1.0  # younger steps are not checked


class CollectiveWatchdog:
    """`failure` is polled for failures ("" is none) and `abort` called at most once, both from the watchdog's own thread.

    `stuck_s` bounds work without a limit of its own.
    """

    def __init__(
        self,
        failure: Callable[[], str],
        abort: Callable[[], None],
        *,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = time.monotonic,
        starved: Callable[[float], float] = lambda now: 0.0,
    ) -> None:
        """`starved` returns the seconds since its last call, which may be long ago, in which a rank had no processor."""
        self.reason = ""
        self._starved = starved
        self._failure, self._abort, self._clock = failure, abort, clock
        self._stuck_s = stuck_s
        self._lost_s = 0.0  # seconds in which a rank had no processor, in total
        self._ends: dict[
            int, tuple[float, float]
        ] = {}  # in flight: when it began, and when it is stuck if no time is lost
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, stuck_s: float | None = None) -> int:
        """Work in which other ranks take part has begun; returns its number. Callable from any thread."""
        number = next(self._numbers)
        now = self._clock()
        self._ends[number] = now, now + (stuck_s or self._stuck_s) - self._lost_s
        return number

    def end(self, number: int) -> None:
        """The work has ended."""
        self._ends.pop(number, None)

    @contextmanager
    def guard(self, stuck_s: float | None = None) -> Iterator[None]:
        """The work inside may take `stuck_s`."""
        number = self.begin(stuck_s)
        try:
            yield
        finally:
            self.end(number)

    def look(self) -> bool:
        """One check; True once the watchdog is done."""
        if self.reason:
            return True
        reason, now = self._failure(), self._clock()
        under_way = list(self._ends.values())
        if any(now - began > YOUNG_S for began, _ in under_way):
            self._lost_s += self._starved(now)
        late = [end for _, end in under_way if end + self._lost_s <= now]
        if not reason and late:
            reason = "a step waits for another rank that does not come"
        if reason:
            self.reason = reason
            self._abort()
        return bool(reason)

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(LOOK_S) and not self.look():
            pass

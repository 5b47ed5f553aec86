"""A thread that sees to it that no step of a GPU waits for another rank for ever.

Owned by workers.collectives.cuda.CudaGroup. It looks at how long the oldest step under way has run and at what the communicators
report; then it aborts them once, so that whoever waits for the device goes on and finds `reason`. Time in which a rank of the
engine wanted a processor and had none counts against nobody.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_S = 12.0  # a step that has not ended by now waits for somebody who will not come
LOOK_S = 0.25
YOUNG_S = 1.0  # what is younger is not looked into


class CollectiveWatchdog:
    """`failure` is asked for trouble ("" is none) and `abort` called at most once, both from the watch's own thread.

    `start_s` bounds what `guard` covers without a limit of its own.
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
        """`starved` says for how long since the last call, which may be long ago, a rank had no processor."""
        self.reason = ""
        self._starved = starved
        self._failure, self._abort, self._clock = failure, abort, clock
        self._stuck_s = stuck_s
        self._lost_s = 0.0  # in which a rank had no processor, in all
        self._ends: dict[
            int, tuple[float, float]
        ] = {}  # what is under way: when it began, and when it is stuck if no time is lost
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, stuck_s: float | None = None) -> int:
        """Something is under way that other ranks have a part in; any thread may call it."""
        number = next(self._numbers)
        now = self._clock()
        self._ends[number] = now, now + (stuck_s or self._stuck_s) - self._lost_s
        return number

    def end(self, number: int) -> None:
        """It has ended."""
        self._ends.pop(number, None)

    @contextmanager
    def guard(self, stuck_s: float | None = None) -> Iterator[None]:
        """What happens inside may take `stuck_s`."""
        number = self.begin(stuck_s)
        try:
            yield
        finally:
            self.end(number)

    def look(self) -> bool:
        """One look; True once it is over."""
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

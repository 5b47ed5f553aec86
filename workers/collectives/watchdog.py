"""A thread that sees to it that no step of a GPU waits for another rank for ever.

Owned by workers.collectives.cuda.CudaGroup. It looks at how long the oldest step under way has run and at what the communicators
report; then it aborts them once, so that whoever waits for the device goes on and finds `reason`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STUCK_S = 12.0  # a step that has not ended by now waits for somebody who will not come
LOOK_S = 0.25


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
    ) -> None:
        self.reason = ""
        self._failure, self._abort, self._clock = failure, abort, clock
        self._stuck_s = stuck_s
        self._ends: dict[int, float] = {}  # when what is under way counts as stuck
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, stuck_s: float | None = None) -> int:
        """Something is under way that other ranks have a part in; any thread may call it."""
        number = next(self._numbers)
        self._ends[number] = self._clock() + (stuck_s or self._stuck_s)
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
        reason = self._failure()
        late = [end for end in list(self._ends.values()) if end <= self._clock()]
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

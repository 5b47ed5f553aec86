"""Waiting for several sources at once in a blocking loop, and waking such a loop from another thread.

Owned by the one thread that calls wait(). Must never hold state of the sources: they are queried on every iteration.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

NEVER = float("inf")


class Source(Protocol):
    """What a Poller can wait for: sockets, connections, children, channels, wakers."""

    def poll_targets(self) -> Sequence[Any]:
        """File descriptors or zmq sockets, constant over the source's lifetime."""

    def tick(self, now: float) -> float:
        """Does what is due (heartbeats) at `now`, and returns the time.monotonic() of the next call."""

    def acknowledge(self) -> bool:
        """Called before the callback of a readable source; True when tick() is due again."""


class Waker:
    """Wakes a Poller from another thread. `set` is thread-safe; many sets may become one callback."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = (
            threading.RLock()
        )  # a closed descriptor's number may be reused; reentrant, since signal handlers call set too

    def set(self) -> None:
        """Makes the poller call back once more. Does nothing after close()."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def acknowledge(self) -> bool:
        """Resets the waker. Poller calls it; loops without one (asyncio's add_reader) call it first."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass
        return False

    def fileno(self) -> int:
        return self._fd

    def poll_targets(self) -> tuple[int]:
        return (self._fd,)

    def tick(self, now: float) -> float:
        return NEVER

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Poller:
    """Waits for any of its sources, and keeps their heartbeats running.

    poller.add(server, on_front); poller.add(channel, on_boot); while True: poller.wait(timeout_s)
    """

    def __init__(self) -> None:
        self._zmq = zmq.Poller()
        self._callbacks: dict[Source, Callable[[], None]] = {}
        self._source_of: dict[Any, Source] = {}
        self._due: dict[Source, float] = {}
        self._next_due = NEVER

    def add(self, source: Source, on_readable: Callable[[], None]) -> None:
        """`on_readable` drains the source; it may add and remove sources."""
        for target in source.poll_targets():
            self._zmq.register(target, zmq.POLLIN)
            self._source_of[target] = source
        self._callbacks[source] = on_readable
        self._due[source] = self._next_due = 0.0

    def remove(self, source: Source) -> None:
        """Forgets `source`; call it before the source is closed."""
        for target in [t for t, s in self._source_of.items() if s is source]:
            self._zmq.unregister(target)
            del self._source_of[target]
        self._callbacks.pop(source, None)
        self._due.pop(source, None)

    def wait(self, timeout_s: float | None) -> bool:
        """Sleeps until a source is readable (0: only checks), then calls the callbacks; True when any was called.

        Callbacks are also called when a source's heartbeat was due, since that may have detected a dead peer.
        """
        now = time.monotonic()
        ready: dict[Source, None] = {}
        if self._next_due <= now:
            self._tick(now, ready)
        wait_s = self._next_due - now
        if timeout_s is not None and timeout_s < wait_s:
            wait_s = timeout_s
        # zmq sleeps for whole milliseconds: round up, or the remainder would be spent spinning.
        wait_ms = 0 if ready or wait_s <= 0 else None if wait_s == NEVER else int(wait_s * 1000) + 1
        for target, _ in self._zmq.poll(wait_ms):
            source = self._source_of[target]
            if source.acknowledge():
                self._due[source] = self._next_due = 0.0
            ready[source] = None
        for source in ready:
            callback = self._callbacks.get(source)
            if callback is not None:
                callback()
        return bool(ready)

    def _tick(self, now: float, ready: dict[Source, None]) -> None:
        for source, due in list(self._due.items()):
            if due <= now:
                self._due[source] = source.tick(now)
                ready[source] = None
        self._next_due = min(self._due.values(), default=NEVER)

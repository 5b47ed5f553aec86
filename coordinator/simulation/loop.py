"""An asyncio event loop in virtual time: it never sleeps and has no files; a simulated process runs it when something is due.

Coroutines of the product run on it unchanged: their timers, time-outs and futures follow the clock of the process.
"""

from __future__ import annotations

import asyncio
from asyncio import BaseEventLoop, events
from collections.abc import Callable
from typing import Any

from trireme.coordinator.simulation.timeline import NEVER

MAX_ROUNDS = 10_000
RESOLUTION_S = 1e-9  # as in asyncio's own loops: timers this close are due


class _NoFiles:
    """An empty selector."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class VirtualLoop(BaseEventLoop):
    """`clock` is that of the process. `turn` runs everything ready or due, and returns the seconds until the next timer."""

    _ready: Any
    _scheduled: Any
    _run_once: Any

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _NoFiles()
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

    def time(self) -> float:
        return self._clock()

    def turn(self) -> float:
        """One iteration. Raises RuntimeError when callbacks schedule callbacks without end."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            for _ in range(MAX_ROUNDS):
                if not (self._ready or self._next_due() <= self._clock() + RESOLUTION_S):
                    return max(0.0, self._next_due() - self._clock())
                self._run_once()
        finally:
            events._set_running_loop(before)
        raise RuntimeError(f"an event loop was still busy after {MAX_ROUNDS} rounds at {self._clock():.6f}")

    def end(self) -> None:
        """Cancels every task and closes. The owner has cut its links, so that no peer notices."""
        events._set_running_loop(self)
        try:
            for _ in range(3):
                for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name()):
                    task.cancel()
                while self._ready:
                    self._run_once()
        finally:
            events._set_running_loop(None)
        self.close()

    def _next_due(self) -> float:
        return self._scheduled[0].when() if self._scheduled else NEVER

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

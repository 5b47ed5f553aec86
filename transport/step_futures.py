"""Futures of steps that a worker has launched without waiting, and the thread that waits for them in launch order.

Used by whoever passes plans to a worker: the in-process executor, and workers.main.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from trireme.transport.wire.messages import StepResult


class StepFuture(Protocol):
    """A launched step."""

    def result(self) -> StepResult | None:
        """Waits for the step. None where another worker reports the result. Raises the step's exception."""
        ...


class Waiter:
    """Thread that waits for steps: `results` fills in order; `error` is a step's exception, after which it stops; `wake` is
    called after each."""

    def __init__(self, wake: Callable[[], None], results: deque[StepResult]) -> None:
        self.error: BaseException | None = None
        self._wake, self._results = wake, results
        self._tickets: queue.SimpleQueue[StepFuture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, name="results", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, ticket: StepFuture) -> None:
        self._tickets.put(ticket)

    def close(self) -> None:
        """Returns when all queued steps have ended."""
        if self._thread.is_alive():
            self._tickets.put(None)
            self._thread.join()

    def _wait(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                result = ticket.result()
            except BaseException as error:  # main of a thread: the owner re-raises it as the root cause
                self.error = error
                self._wake()
                return
            if result is not None:
                self._results.append(result)
            self._wake()

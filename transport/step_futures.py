"""Steps that a worker has launched without waiting, and the thread that waits for them instead, in the order of launches.

Used by whoever gives a worker its plans: the in-process executor, and workers.main.
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
        """Waits for it. None where another worker tells what it gave. Raises what went wrong."""
        ...


class Waiter:
    """`results` fill in order, `error` is what a step raised, after which nothing is waited for; `wake` is called at each."""

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
        """Returns when all that was put has ended."""
        if self._thread.is_alive():
            self._tickets.put(None)
            self._thread.join()

    def _wait(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            try:
                result = ticket.result()
            except BaseException as error:  # main of a thread: the owner raises it again as the root cause
                self.error = error
                self._wake()
                return
            if result is not None:
                self._results.append(result)
            self._wake()

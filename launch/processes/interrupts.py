"""SIGINT and SIGTERM before a supervisor handles them: a command exits at once, leaving nothing behind and no traceback.

Used by launch/cli.py and, for `trireme serve`, by launch/processes/parts.py. Standard library only: it runs before all other
imports.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self, TypeAlias

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler: TypeAlias = Callable[[int, FrameType | None], None]
Former: TypeAlias = list[tuple[signal.Signals, Any]]


def leave(number: int, frame: FrameType | None = None) -> None:
    """A signal handler that ends this process at once, with 128 + the signal's number as exit status, as in shells.

    It raises nothing: an exception in the middle of an import may be lost (importlib has weak references with callbacks) or end
    as a traceback. A container's init process, too, is ended by SIGTERM only if there is a handler.
    """
    os._exit(128 + number)


def catch_signals(handler: Handler) -> Former:
    """Routes SIGINT and SIGTERM to `handler`. Returns the former handlers. Main thread only."""
    return [(number, signal.signal(number, handler)) for number in SIGNALS]


def release_signals(former: Former, *, is_leaving: bool = False) -> None:
    """Restores the former handlers. A process that `is_leaving` ignores the signals instead: its exit status stands."""
    for number, handler in former:
        signal.signal(number, signal.SIG_IGN if is_leaving else handler)


class StartGuard:
    """Guards a start that a signal may end at any moment: what has been started so far is stopped by `ends`, last first, and the
    process exits. A context manager."""

    def __init__(self, leave: Callable[[int], None] = leave) -> None:
        self.ends: list[Callable[[], None]] = []
        self._leave = leave
        self._number = 0
        self._is_held = False
        self._heir: Callable[[int], None] | None = None

    def __enter__(self) -> Self:
        self._former = catch_signals(self._on_signal)
        return self

    def __exit__(self, *reason: object) -> None:
        release_signals(self._former)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defers signals to the end of the block, in which something starts that must be added to `ends`."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._number:
                self._end()

    def hand_over(self, heir: Callable[[int], None]) -> None:
        """From now on a signal only calls `heir`, which is safe to call at any moment."""
        self._heir = heir

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._heir is not None:
            self._heir(number)
            return
        is_first = not self._number
        self._number = self._number or number
        if is_first and not self._is_held:
            self._end()

    def _end(self) -> None:
        while self.ends:
            with suppress(Exception):  # from a cleanup that the signal interrupted; the others must still run
                self.ends.pop()()
        self._leave(self._number)

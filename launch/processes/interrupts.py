"""SIGINT and SIGTERM before a supervisor listens to them: a command ends at once, with nothing left behind and no traceback.

Used by launch/cli.py and, for `trireme serve`, by launch/processes/parts.py. Standard library only: it comes before all other
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
    """A signal handler that ends this process at once, with 128 and the signal's number as its exit status, as shells have it.

    It raises nothing: an exception in the middle of an import may be lost (importlib has weak references with callbacks) or end
    as a traceback. The init process of a container, too, is ended by SIGTERM where there is a handler.
    """
    os._exit(128 + number)


def catch_signals(handler: Handler) -> Former:
    """SIGINT and SIGTERM go to `handler` from now on. Main thread only."""
    return [(number, signal.signal(number, handler)) for number in SIGNALS]


def release_signals(former: Former, *, is_leaving: bool = False) -> None:
    """Gives them back to whom they went before. A process that `is_leaving` ignores them instead: its exit status stands."""
    for number, handler in former:
        signal.signal(number, signal.SIG_IGN if is_leaving else handler)


class StartGuard:
    """A start that a signal may end at any moment: what has been started so far is stopped by `ends`, last first, and the
    process leaves. A context manager."""

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
        """A signal waits until the end of the block, in which something comes to life that `ends` must know."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._number:
                self._end()

    def hand_over(self, heir: Callable[[int], None]) -> None:
        """From now on a signal is told to `heir`, which is safe to call at any moment, and does nothing else."""
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
            with suppress(Exception):  # of what the signal found in the middle of its own end; the others must end too
                self.ends.pop()()
        self._leave(self._number)

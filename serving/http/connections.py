"""How many connections each front end of one listening socket has, known to all of them: a few numbers in a shared file.

Made by serving/main.py, used by serving/http/accept.py. Each writes its own number and reads the others'; a number is 8
aligned bytes, so that no lock is needed. What is not renewed is not believed: its writer has ended, or is busy with something else.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

FRESH_S = 1.5  # for which a number is believed
RENEW_S = 0.5
_COUNT_BITS = 24
_ABSENT = 0


class ConnectionCounts:
    """`index` is this front end's number among `total`. `clock` is one that all processes of the host share, in seconds."""

    def __init__(self, path: Path, index: int, total: int, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._index = index
        size = 8 * total
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)  # the same for all: nothing is lost
            self._slots = np.frombuffer(mmap.mmap(file, size), dtype=np.int64)
        finally:
            os.close(file)

    def tell(self, num_connections: int) -> None:
        """This front end goes on, and has so many."""
        count = min(num_connections, (1 << _COUNT_BITS) - 1)
        self._slots[self._index] = self._now_ms() << _COUNT_BITS | count

    def leave(self) -> None:
        """This front end takes no more."""
        self._slots[self._index] = _ABSENT

    def least_of_others(self) -> int | None:
        """The fewest that another one has, None when there is nobody else."""
        oldest = self._now_ms() - int(FRESH_S * 1000)
        slots = [int(slot) for i, slot in enumerate(self._slots) if i != self._index]
        counts = [slot & (1 << _COUNT_BITS) - 1 for slot in slots if slot >> _COUNT_BITS >= max(oldest, 1)]
        return min(counts, default=None)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

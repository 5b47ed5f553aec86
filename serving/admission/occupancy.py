"""How many choices all front ends of a deployment have in flight together, and the adaptive limit that they share.

Used by serving/front.py. Each front end writes its own number whenever it changes, and reads those of the others when it admits a
request: no message can be late. Two that admit at the same moment do not see each other; the engines' own bounds are exact.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from trireme.serving.admission.shared_file import SharedFile

STALE_S = 15.0  # after which a silent front end counts as gone; the supervisor ends it then
_CELL = struct.Struct("<dd")
_ENTRY = struct.Struct("<qd")  # choices, when that was written


class Occupancy:
    """Without a file: of this front end alone. Also a Cell (serving/admission/concurrency.py)."""

    def __init__(
        self, path: str | Path | None = None, index: int = 0, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`index` is the number of this front end. Raises OSError."""
        self._file = SharedFile(path) if path is not None else None
        self._index = index
        self._clock = clock
        self._told = -1
        self._told_at = 0.0
        self._own_cell = (0.0, 0.0)
        self.tell(0)  # and not what a former life had

    def tell(self, num_rows: int) -> None:
        """This many choices are under way here."""
        now = self._clock()
        if self._file is None or (num_rows == self._told and now - self._told_at < STALE_S / 4):
            return
        self._told, self._told_at = num_rows, now
        self._file.write(_ENTRY.pack(num_rows, now), _CELL.size + self._index * _ENTRY.size)

    def others(self, num_fronts: int) -> int:
        """Choices that the other ones of `num_fronts` front ends have under way."""
        if self._file is None or num_fronts <= 1:
            return 0
        entries = _ENTRY.iter_unpack(self._file.read(num_fronts * _ENTRY.size, _CELL.size))
        oldest = self._clock() - STALE_S
        return sum(rows for i, (rows, at) in enumerate(entries) if i != self._index and at > oldest)

    def load(self) -> tuple[float, float]:
        """The shared limit, and when it was lowered last; zeros at first."""
        if self._file is None:
            return self._own_cell
        limit, lowered_at = _CELL.unpack(self._file.read(_CELL.size))
        return limit, lowered_at

    def store(self, limit: float, lowered_at: float) -> None:
        self._own_cell = (limit, lowered_at)
        if self._file is not None:
            self._file.write(_CELL.pack(limit, lowered_at))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ChoiceCount:
    """Choices on engines, or on their way there: of this front end, and of all that share these engines."""

    def __init__(self, on_engines: Callable[[], int], occupancy: Occupancy, num_fronts: int) -> None:
        """`on_engines` gives the number of this front end's choices that engines have."""
        self._on_engines = on_engines
        self._occupancy = occupancy
        self._num_fronts = num_fronts
        self._num_coming = 0  # admitted and on their way to an engine

    def in_flight(self) -> int:
        """Choices of all front ends that share these engines."""
        return self.tell() + self._occupancy.others(self._num_fronts)

    def tell(self) -> int:
        """Tells the other front ends how many choices are in flight here, and returns it."""
        own = self._on_engines() + self._num_coming
        self._occupancy.tell(own)
        return own

    @contextlib.contextmanager
    def coming(self, num_rows: int) -> Iterator[None]:
        """Around the submit of admitted choices, so that they are counted until they are on an engine."""
        self._num_coming += num_rows
        self.tell()
        try:
            yield
        finally:
            self._num_coming -= num_rows
            self.tell()

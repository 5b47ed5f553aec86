"""What engines have counted over all their lives. An engine counts from its start, so a restart would let its counters fall.

Used by serving/api/statistics.py at a scrape. The last numbers of each engine lie in a file of the private run directory that
all front ends share, so that any of them gives the same page, also after it was restarted itself. What an engine counted after
the last scrape of a life is lost with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trireme.serving.admission.shared_file import SharedFile

RECORD_BYTES = 4096
Numbers = Mapping[str, Any]


class EngineLife(msgspec.Struct):
    """Counters of one engine: of its present life, and the sums of those before."""

    epoch: int
    last: dict[str, float]
    before: dict[str, float]

    def note(self, epoch: int, counts: Mapping[str, float]) -> None:
        """What it says now. An answer that was overtaken changes nothing."""
        if epoch > self.epoch:
            self.before, self.last, self.epoch = self.sums(), {}, epoch
        if epoch == self.epoch:
            self.last = {**self.last, **{key: max(value, self.last.get(key, 0.0)) for key, value in counts.items()}}

    def sums(self) -> dict[str, float]:
        keys = self.last.keys() | self.before.keys()
        return {key: self.before.get(key, 0.0) + self.last.get(key, 0.0) for key in keys}


class EngineTotals:
    """`counters` are the keys that count. Without a file the sums are those that this process has seen."""

    def __init__(self, counters: Collection[str], path: str | Path | None = None) -> None:
        """Raises OSError."""
        self._counters = counters
        self._file = SharedFile(path) if path is not None else None
        self._lives: dict[int, EngineLife] = {}

    def over_lives(self, engine: int, answer: Numbers) -> dict[str, Any]:
        """An engine's statistics with its counters summed over its lives; of one that did not answer (empty), these alone."""
        if self._file is None:
            return self._noted(engine, answer)
        with self._file.locked(RECORD_BYTES, engine * RECORD_BYTES):
            self._load(engine, self._file)
            found = self._noted(engine, answer)
            if answer and engine in self._lives:
                data = msgspec.msgpack.encode(self._lives[engine])
                if len(data) < RECORD_BYTES - 2:
                    self._file.write(len(data).to_bytes(2, "little") + data, engine * RECORD_BYTES)
            return found

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _noted(self, engine: int, answer: Numbers) -> dict[str, Any]:
        if answer:
            counts = {key: float(value) for key, value in answer.items() if key in self._counters}
            life = self._lives.setdefault(engine, EngineLife(-1, {}, {}))
            life.note(int(answer.get("epoch", 0)), counts)
        known = self._lives.get(engine)
        return {**answer, **(known.sums() if known is not None else {})}

    def _load(self, engine: int, file: SharedFile) -> None:
        """Takes over what another front end has noted since."""
        record = file.read(RECORD_BYTES, engine * RECORD_BYTES)
        size = int.from_bytes(record[:2], "little")
        if not size:
            return
        try:
            life = msgspec.msgpack.decode(record[2 : 2 + size], type=EngineLife)
        except msgspec.MsgspecError:
            return
        mine = self._lives.get(engine)
        if mine is None or life.epoch >= mine.epoch:
            self._lives[engine] = life

"""Rows between two engines, and the order in which they are sent on: free ones at once, suspects trial by trial.

Used by serving/engines/client.py, on its loop. Knows nothing of engines; serving/engines/migration.py says who is a suspect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class Probe:
    """Suspects that run together; over when each of them has gained a token, ended, or lost its engine again."""

    def __init__(self, size: int) -> None:
        self._num_left = size
        self._over = asyncio.Event()

    def settle(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._over.set()

    async def wait(self) -> None:
        await self._over.wait()


class Movable(Protocol):
    rid: int
    trial: Probe | None


Row = TypeVar("Row", bound=Movable)


class Moves(Generic[Row]):
    """`send` places one row and takes it out with `take`; it may wait for long."""

    def __init__(self, send: Callable[[Row], Awaitable[None]]) -> None:
        self._send = send
        self._rows: dict[int, Row] = {}  # by the rid of their last submit
        self._trials: deque[Sequence[Row]] = deque()
        self._lane: asyncio.Task[None] | None = None  # that of the trials
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def start(self, free: Sequence[Row], trials: Sequence[Sequence[Row]], delay_s: float = 0.0) -> None:
        """Sends these rows on, after `delay_s`."""
        for row in free:
            self._rows[row.rid] = row
        if free:
            self._keep(self._send_all(free, delay_s))
        for rows in trials:
            trial = Probe(len(rows))
            for row in rows:
                self._rows[row.rid], row.trial = row, trial
        self._trials.extend(trials)
        if self._trials and (self._lane is None or self._lane.done()):
            self._lane = self._keep(self._run_trials())

    def take(self, row: Row) -> bool:
        """The row has found its engine, or has none. False when somebody else has taken it: it was aborted."""
        return self._rows.pop(row.rid, None) is not None

    def drop(self, rids: Iterable[int]) -> None:
        """Rows that nobody wants any more."""
        for rid in rids:
            row = self._rows.pop(rid, None)
            if row is not None and row.trial is not None:
                row.trial.settle()
                row.trial = None

    def take_all(self) -> list[Row]:
        rows = list(self._rows.values())
        self._rows.clear()
        return rows

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _send_all(self, rows: Sequence[Row], delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        for row in rows:
            if row.rid in self._rows:
                await self._send(row)

    async def _run_trials(self) -> None:
        while self._trials:
            rows = self._trials.popleft()
            trial = next((row.trial for row in rows if row.trial is not None), None)
            await self._send_all(rows, 0.0)
            if trial is not None:
                await trial.wait()

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

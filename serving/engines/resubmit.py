"""Choices between two engines, and the order in which they are sent on: free ones at once, suspects probe by probe.

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
    probe: Probe | None


Choice = TypeVar("Choice", bound=Movable)


class Resubmissions(Generic[Choice]):
    """`send` places one choice and takes it out with `take`; it may wait for long."""

    def __init__(self, send: Callable[[Choice], Awaitable[None]]) -> None:
        self._send = send
        self._choices: dict[int, Choice] = {}  # by the rid of their last submit
        self._probes: deque[Sequence[Choice]] = deque()
        self._lane: asyncio.Task[None] | None = None  # that of the probes
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._choices)

    def start(self, free: Sequence[Choice], probes: Sequence[Sequence[Choice]], delay_s: float = 0.0) -> None:
        """Sends these choices on, after `delay_s`."""
        for choice in free:
            self._choices[choice.rid] = choice
        if free:
            self._keep(self._send_all(free, delay_s))
        for choices in probes:
            probe = Probe(len(choices))
            for choice in choices:
                self._choices[choice.rid], choice.probe = choice, probe
        self._probes.extend(probes)
        if self._probes and (self._lane is None or self._lane.done()):
            self._lane = self._keep(self._run_probes())

    def take(self, choice: Choice) -> bool:
        """The choice has found its engine, or has none. False when somebody else has taken it: it was aborted."""
        return self._choices.pop(choice.rid, None) is not None

    def drop(self, rids: Iterable[int]) -> None:
        """Choices that nobody wants any more."""
        for rid in rids:
            choice = self._choices.pop(rid, None)
            if choice is not None and choice.probe is not None:
                choice.probe.settle()
                choice.probe = None

    def take_all(self) -> list[Choice]:
        choices = list(self._choices.values())
        self._choices.clear()
        return choices

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _send_all(self, choices: Sequence[Choice], delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        for choice in choices:
            if choice.rid in self._choices:
                await self._send(choice)

    async def _run_probes(self) -> None:
        while self._probes:
            choices = self._probes.popleft()
            probe = next((choice.probe for choice in choices if choice.probe is not None), None)
            await self._send_all(choices, 0.0)
            if probe is not None:
                await probe.wait()

    def _keep(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

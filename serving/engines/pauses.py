"""Pause and resume as a frontend asks for them: of each engine, or of the coordinator where engines step together.

Used by serving/engines/client.py, on its loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from trireme.errors import EngineDeadError, EngineError
from trireme.serving.engines.engine import EngineLink
from trireme.serving.engines.placement import Placement
from trireme.topology.lockstep import Mode
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.messages import Call, CallReply

RETRY_S = 0.05  # while there is no coordinator, or no engine


class PauseClient(Protocol):
    """What is needed of EngineClient."""

    async def call(self, engine: int, method: str, timeout_s: float = ..., **args: Any) -> Any: ...


class Pauses:
    """`numbers` gives each question to the coordinator its own. An engine that is away is waited for, `absence_s` at most."""

    def __init__(
        self,
        caller: PauseClient,
        placement: Placement,
        numbers: Iterator[int],
        *,
        in_lockstep: bool,
        absence_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._absence_s = absence_s
        self._num_directed = 0
        self._clock = clock
        self._caller = caller
        self._placement = placement
        self._numbers = numbers
        self._in_lockstep = in_lockstep
        self._asked: dict[int, asyncio.Future[CallReply]] = {}

    async def direct(self, mode: Mode, timeout_s: float) -> None:
        """Pauses the engines of this frontend, or with "" lets them go on; returns when that is so. Raises EngineError when one
        refuses or another pause comes in between, EngineDeadError when an engine stays away, TimeoutError."""
        args = {"mode": mode} if mode else {}
        method = "pause" if mode else "resume"
        async with asyncio.timeout(timeout_s):
            if self._in_lockstep:
                await self._ask_coordinator(method, args)
            else:
                self._num_directed += 1
                calls = (self._ask_engine(engine, method, timeout_s, args) for engine in self._placement.engines)
                await asyncio.gather(*calls)

    async def _ask_engine(self, engine: EngineLink, method: str, timeout_s: float, args: dict[str, Any]) -> None:
        """Asks its next life when this one ends before it has answered, unless another pause or resume was asked for since."""
        number, until = self._num_directed, None
        while True:
            try:
                await self._caller.call(engine.index, method, timeout_s, **args)
                return
            except EngineDeadError as error:
                until = until or self._clock() + self._absence_s
                try:
                    async with asyncio.timeout(until - self._clock()):
                        await asyncio.sleep(RETRY_S)
                        while not engine.is_up:
                            await self._placement.wait_change()
                except TimeoutError:
                    raise error from None
                if number != self._num_directed:
                    raise EngineError("another pause or resume came in between") from None

    def on_message(self, message: Any) -> None:
        """What the coordinator has sent, or that it is gone."""
        if isinstance(message, CallReply):
            if (asked := self._asked.get(message.call_id)) is not None and not asked.done():
                asked.set_result(message)
        elif isinstance(message, Disconnected):
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ConnectionError())

    async def _ask_coordinator(self, method: str, args: dict[str, Any]) -> None:
        """Asks again when it is replaced before it has answered."""
        while True:
            call_id = next(self._numbers)
            reply = self._asked[call_id] = asyncio.get_running_loop().create_future()
            link = self._placement.coordinator
            try:
                if link is not None and link.send(Call(call_id, method, args)):
                    answer = await reply
                    if not answer.ok:
                        raise EngineError(answer.error)
                    return
                await asyncio.sleep(RETRY_S)
            except ConnectionError:
                continue
            finally:
                del self._asked[call_id]

"""Where a choice goes: the engine that the coordinator names, or one of our own while it is away; and the tickets given back.

Used by serving/engines/client.py, on its loop. Knows engines and their links, but neither streams nor what a request asks for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from trireme.errors import EngineDeadError, OverloadedError
from trireme.serving.engines.engine import EngineLink, Link
from trireme.serving.engines.fallback_router import FallbackRouter
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.messages import Released, Route, Routed, View

log = logging.getLogger(__name__)

ROUTE_TIMEOUT_S = 1.0
LINK_WAIT_S = 1.0
ASKING_S = 2.5  # after which the coordinator is not asked again, so that a choice takes less than 5 s in all


class Placement:
    """`engines` are those this frontend reaches, by rising number; `numbers` gives each question to the coordinator its own."""

    def __init__(
        self,
        engines: Sequence[EngineLink],
        numbers: Iterator[int],
        clock: Callable[[], float],
        *,
        is_coordinated: bool,
        rng: random.Random | None = None,
    ) -> None:
        self.engines = engines
        self.coordinator: Link | None = None
        self.fallback_router = FallbackRouter(rng)
        self.view: View | None = None
        self.num_fallbacks = 0  # choices made without the coordinator
        self._is_coordinated = is_coordinated
        self._numbers = numbers
        self._clock = clock
        self.routes: dict[int, asyncio.Future[Routed]] = {}
        self._changed = asyncio.Event()
        self._given_up = ""

    def give_up(self, reason: str) -> None:
        """No choice will find an engine any more, neither those that wait for one nor those to come."""
        self._given_up = reason
        self.note_change()

    def on_message(self, message: Any) -> None:
        """What the coordinator has sent, or that it is gone."""
        if isinstance(message, Routed):
            answer = self.routes.get(message.rid)
            if answer is None or answer.done():
                self.release(message)
            else:
                answer.set_result(message)
        elif isinstance(message, View):
            self.view = message
            self.fallback_router.on_view(message)
        elif isinstance(message, Disconnected):
            for answer in self.routes.values():
                if not answer.done():
                    answer.set_exception(TimeoutError())
            log.warning("coordinator is away, choosing engines from the last view. reason=%s", message.reason)

    async def place(self, route: Route, until: float) -> tuple[EngineLink, int]:
        """An engine that is up, and the ticket for it. Raises EngineDeadError when none comes up before `until`, and
        OverloadedError after `give_up`."""
        candidates = [self.at(route.pin)] if route.pin >= 0 else self.engines
        while True:
            self._check_given_up()
            if not any(engine.is_up for engine in candidates):
                await self._wait_up(candidates, until)
                self._check_given_up()
            try:
                return await self.place_once(route)
            except EngineDeadError:
                if self._clock() >= until:
                    raise

    def _check_given_up(self) -> None:
        if self._given_up:
            raise OverloadedError(self._given_up)

    async def _wait_up(self, candidates: Sequence[EngineLink], until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - self._clock()):
                while not (self._given_up or any(engine.is_up for engine in candidates)):
                    await self.wait_change()

    async def place_once(self, route: Route) -> tuple[EngineLink, int]:
        """An engine for `route` and the ticket of its submit: 0 where the coordinator did not choose the engine."""
        pin = route.pin
        if not self._is_coordinated:
            return self._place_alone(pin), 0
        give_up = self._clock() + ASKING_S
        for tries in range(3):
            if tries and self._clock() >= give_up:
                break
            routed = await self._route(msgspec.structs.replace(route, rid=next(self._numbers)))
            if routed is None or not self.has(routed.engine):
                # away, or just back and not yet told what our own links know
                self.num_fallbacks += 1
                return self._place_alone(pin), 0
            engine = self.at(routed.engine)
            if await self._is_there(engine, routed):
                if pin >= 0 or not engine.stalled or not self._num_working():
                    return engine, routed.ticket
                self.release(routed)
        return self._place_alone(pin), 0

    def _num_working(self) -> int:
        return sum(engine.is_up and not engine.stalled for engine in self.engines)

    def _place_alone(self, pin: int) -> EngineLink:
        if pin >= 0:
            engine = self.at(pin)
            if not engine.is_up:
                raise EngineDeadError(f"engine {pin} is not available: {engine.reason}")
            return engine
        up = [engine.index for engine in self.engines if engine.is_up]
        up = [index for index in up if not self.at(index).stalled] or up
        if not up:
            raise EngineDeadError(f"no engine is available: {self.engines[0].reason}")
        return self.at(self.fallback_router.choose(up))

    def has(self, engine: int) -> bool:
        return 0 <= engine - self.engines[0].index < len(self.engines)

    def at(self, engine: int) -> EngineLink:
        return self.engines[engine - self.engines[0].index]

    async def _route(self, route: Route) -> Routed | None:
        """The coordinator's answer, or None when it is away. A place given too late or to nobody is returned to it."""
        link = self.coordinator
        if link is None or not link.is_up:
            return None
        answer: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        self.routes[route.rid] = answer
        if not link.send(route):
            del self.routes[route.rid]
            return None
        try:
            async with asyncio.timeout(ROUTE_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self._release_if_given(answer)
            return None
        except asyncio.CancelledError:
            self._release_if_given(answer)
            raise
        finally:
            del self.routes[route.rid]

    def _release_if_given(self, answer: asyncio.Future[Routed]) -> None:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self.release(answer.result())

    async def _is_there(self, engine: EngineLink, routed: Routed) -> bool:
        """Waits a moment for the link to the engine's present life; gives the place back when it does not come, or was that in a
        life whose end the coordinator has not seen yet."""
        try:
            async with asyncio.timeout(LINK_WAIT_S):
                while not (engine.is_up and engine.welcome is not None and engine.welcome.epoch >= routed.epoch):
                    if engine.lost_epoch >= routed.epoch:
                        raise TimeoutError
                    await self.wait_change()
        except TimeoutError:
            self.release(routed)
            return False
        except asyncio.CancelledError:
            self.release(routed)
            raise
        return True

    def release(self, routed: Routed) -> None:
        if routed.engine >= 0 and self.coordinator is not None:
            self.coordinator.send(Released(engine=routed.engine, epoch=routed.epoch, count=1))

    async def wait_change(self) -> None:
        changed = self._changed
        await changed.wait()

    def note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

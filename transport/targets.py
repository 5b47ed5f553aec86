"""One request, several targets that could answer it: selection, retries elsewhere, circuit breaking, optional hedging.

Used by clients of several servers (launch/api/multi_server.py). The rules are in transport/resilience.py; the waiting is here.
Protocol-agnostic: an attempt is the caller's coroutine, whose exception type tells whether another attempt may help.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from trireme.errors import OverloadedError, TransportError
from trireme.transport.resilience import Backoff, Breaker, RetryBudget, State

T = TypeVar("T")
R = TypeVar("R")


class TargetFailed(TransportError):
    """The target is at fault: another one, or the same one later, may answer."""

    code = "target_failed"


class TargetBusy(TransportError):
    """The target is healthy but asks for no requests for `wait_s` seconds."""

    code = "target_busy"

    def __init__(self, message: str, *, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Retry limits. `attempts` counts the first one; `hedge_s` 0: no hedging; `busy_s` is the longest wait for a busy target."""

    attempts: int = 4
    backoff: Backoff = Backoff()
    retry_ratio: float = 0.1
    retry_reserve: float = 10.0
    failures: int = 5  # consecutive ones until the breaker opens
    rest_s: float = 1.0
    most_rest_s: float = 30.0
    busy_s: float = 30.0
    hedge_s: float = 0.0


class _Target(Generic[T]):
    def __init__(self, value: T, breaker: Breaker) -> None:
        self.value = value
        self.breaker = breaker
        self.num_open = 0
        self.busy_until = 0.0


class Targets(Generic[T]):
    """Belongs to one asyncio loop."""

    def __init__(
        self,
        targets: Sequence[T],
        patience: Patience = Patience(),
        *,
        clock: Callable[[], float] = time.monotonic,
        dice: random.Random | None = None,
    ) -> None:
        if not targets:
            raise ValueError("one target at least")
        self._targets = [
            _Target(target, Breaker(patience.failures, patience.rest_s, patience.most_rest_s)) for target in targets
        ]
        self._patience = patience
        self._budget = RetryBudget(patience.retry_ratio, patience.retry_reserve)
        self._clock = clock
        self._dice = dice or random.Random()
        self.num_retries = self.num_hedges = 0

    def states(self) -> list[tuple[T, State, int]]:
        """Each target, its breaker state, and its number of open requests."""
        now = self._clock()
        return [(target.value, target.breaker.state(now), target.num_open) for target in self._targets]

    async def call(self, attempt: Callable[[T], Awaitable[R]]) -> R:
        """The first answer. An attempt that raises TargetFailed or TargetBusy is repeated, elsewhere if possible, while attempts
        and budget last; any other exception is passed on. Raises OverloadedError when no target may be asked."""
        self._budget.request()
        tried: list[_Target[T]] = []
        waited_s = 0.0
        while True:
            target = await self._choose(tried)
            tried.append(target)
            try:
                return await self._with_hedge(target, attempt, tried)
            except (TargetFailed, TargetBusy):
                if len(tried) >= self._patience.attempts or not self._budget.withdraw():
                    raise
            self.num_retries += 1
            waited_s = self._patience.backoff.wait_s(len(tried) - 1, waited_s, self._dice)
            await asyncio.sleep(waited_s)

    # ------------------------------------------------------------ choice

    async def _choose(self, tried: Sequence[_Target[T]]) -> _Target[T]:
        """The least loaded available target, untried ones first; waits if all are busy or their breakers open."""
        give_up = self._clock() + self._patience.busy_s
        while True:
            now = self._clock()
            ready = [target for target in self._targets if target.breaker.allows(now) and target.busy_until <= now]
            if ready:
                self._dice.shuffle(ready)
                return min(ready, key=lambda target: (target in tried, target.num_open))
            soonest = min(max(target.busy_until, target.breaker.opens_at()) for target in self._targets)
            if soonest > give_up:
                wait_s = max(1.0, soonest - now)
                raise OverloadedError(f"none of {len(self._targets)} servers answers", retry_after_s=wait_s)
            await asyncio.sleep(max(0.01, min(soonest - now, 1.0)))
            if self._clock() > give_up:
                raise OverloadedError(f"none of {len(self._targets)} servers answers")

    # ------------------------------------------------------------ attempts

    async def _with_hedge(self, target: _Target[T], attempt: Callable[[T], Awaitable[R]], tried: list[_Target[T]]) -> R:
        if not self._patience.hedge_s:
            return await self._once(target, attempt)
        racing = {asyncio.ensure_future(self._once(target, attempt))}
        try:
            done, _ = await asyncio.wait(racing, timeout=self._patience.hedge_s)
            if not done and (second := self._second(tried)) is not None:
                tried.append(second)
                self.num_hedges += 1
                racing.add(asyncio.ensure_future(self._once(second, attempt)))
            while True:
                done, racing = await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
                answers = [task for task in done if not isinstance(task.exception(), TargetFailed | TargetBusy)]
                if answers or not racing:
                    return (answers or list(done))[0].result()
        finally:
            for task in racing:
                task.cancel()
            await asyncio.gather(*racing, return_exceptions=True)

    def _second(self, tried: Sequence[_Target[T]]) -> _Target[T] | None:
        now = self._clock()
        others = [
            target
            for target in self._targets
            if target not in tried and target.breaker.state(now) == "closed" and target.busy_until <= now
        ]
        if not others or not self._budget.withdraw():
            return None
        return min(others, key=lambda target: target.num_open)

    async def _once(self, target: _Target[T], attempt: Callable[[T], Awaitable[R]]) -> R:
        breaker = target.breaker
        ticket = breaker.enter(self._clock())
        target.num_open += 1
        try:
            answer = await attempt(target.value)
        except TargetFailed:
            breaker.failed(ticket, self._clock())
            raise
        except TargetBusy as busy:
            breaker.succeeded(ticket)
            target.busy_until = self._clock() + busy.wait_s
            raise
        except asyncio.CancelledError:
            breaker.left(ticket)
            raise
        except BaseException:
            breaker.succeeded(ticket)  # it answered
            raise
        finally:
            target.num_open -= 1
        breaker.succeeded(ticket)
        return answer

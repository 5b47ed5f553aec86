"""Retry policies: back-off with jitter, a retry budget, a circuit breaker per target.

Used by transport/targets.py. Pure: clock and random source are arguments. The libraries considered (tenacity, stamina,
circuitbreaker) read the clock themselves and have no budget; each of these is a screenful.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

Jitter = Literal["none", "full", "equal", "decorrelated"]
State = Literal["closed", "open", "half_open"]


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Exponential back-off from `base_s` up to `cap_s` seconds, with the jitter of Brooker, "Exponential Backoff And Jitter"
    (2015): full draws from the whole interval, equal from its upper half, decorrelated from up to three times the previous
    wait."""

    base_s: float = 0.05
    cap_s: float = 5.0
    jitter: Jitter = "full"

    def wait_s(self, retry: int, last_s: float, dice: random.Random) -> float:
        """Seconds to wait before retry number `retry` (from 0). `last_s` is the previous wait; 0: none."""
        most = min(self.cap_s, self.base_s * 2.0 ** min(retry, 60))
        if self.jitter == "full":
            return dice.uniform(0.0, most)
        if self.jitter == "equal":
            return most / 2 + dice.uniform(0.0, most / 2)
        if self.jitter == "decorrelated":
            return min(self.cap_s, dice.uniform(self.base_s, 3 * max(last_s, self.base_s)))
        return most


class RetryBudget:
    """Retries may be `ratio` of the requests, plus `reserve`: when everything fails, load grows by no more than that share (after
    Finagle's RetryBudget)."""

    def __init__(self, ratio: float = 0.1, reserve: float = 10.0) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._balance = reserve
        self.num_denied = 0

    def request(self) -> None:
        """Credits a new request, not a retry."""
        self._balance = min(self._reserve + 100 * self._ratio, self._balance + self._ratio)

    def withdraw(self) -> bool:
        """Takes one retry from the budget; False when it is empty."""
        if self._balance < 1.0:
            self.num_denied += 1
            return False
        self._balance -= 1.0
        return True


class Breaker:
    """Circuit breaker: keeps requests away from a failing target.

        closed --threshold failures in a row--> open --rest_s--> half_open --success--> closed
                                                 ^                   |
                                                 +----- failure -----+   (rest_s doubles, up to most_rest_s)

    Half open admits one request at a time. Whoever called `enter` reports how the request ended, with the ticket from there:
    `succeeded`, `failed`, or `left` when that is not known. Reports of requests admitted before the last state change are ignored.
    """

    def __init__(self, threshold: int = 5, rest_s: float = 1.0, most_rest_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_rest_s = self._rest_s = rest_s
        self._most_rest_s = most_rest_s
        self._num_failures = 0
        self._num_changes = 0
        self._until = 0.0
        self._is_open = False
        self._is_probed = False

    def state(self, now: float) -> State:
        if not self._is_open:
            return "closed"
        return "open" if now < self._until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether `enter` would admit a request."""
        state = self.state(now)
        return state == "closed" or (state == "half_open" and not self._is_probed)

    def opens_at(self) -> float:
        """When a request may be admitted again, if none is now."""
        return self._until

    def enter(self, now: float) -> int:
        """Admits a request to the target; `allows` was true. Returns its ticket."""
        self._is_probed = self.state(now) == "half_open"
        return self._num_changes

    def succeeded(self, ticket: int) -> None:
        """Records a success; closes an open breaker. Ignored for a ticket from before the last state change."""
        if ticket != self._num_changes:
            return
        self._num_failures = 0
        if self._is_open:
            self._change(is_open=False)
            self._rest_s = self._first_rest_s

    def failed(self, ticket: int, now: float) -> None:
        """Records a failure at `now`: opens the breaker at the threshold, or again with twice the rest. Old tickets are
        ignored."""
        if ticket != self._num_changes:
            return
        self._num_failures += 1
        if self._is_open:
            self._rest_s = min(self._most_rest_s, 2 * self._rest_s)
        elif self._num_failures < self._threshold:
            return
        self._change(is_open=True)
        self._until = now + self._rest_s

    def left(self, ticket: int) -> None:
        if ticket == self._num_changes:
            self._is_probed = False

    def _change(self, *, is_open: bool) -> None:
        self._num_changes += 1
        self._is_open = is_open
        self._is_probed = False

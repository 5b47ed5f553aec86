"""Exact load: what engines report plus every ticket given since, until the report that has seen it.

Pure (time is passed in). Used by core.py. A late report can never erase a fresh decision, because it names, per frontend, the
highest ticket that its engine had admitted when it was written; applying a report twice is harmless.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

LEASE_S = 30.0  # a ticket neither admitted nor returned for so long was lost
AWAY_S = 5.0  # a longer gap between two calls of `at` means that no message was read in it


class WatchedTime:
    """Time in which the coordinator was running: a stop of its process, or a jump of its clock, does not count."""

    def __init__(self) -> None:
        self._latest: float | None = None
        self._away_s = 0.0

    def at(self, now: float) -> float:
        """Watched seconds up to `now`. Call often, at least once a second."""
        if self._latest is not None and now - self._latest > AWAY_S:
            self._away_s += now - self._latest
        self._latest = now
        return now - self._away_s


@dataclass(slots=True)
class Outstanding:
    """Sums over the tickets given for one engine that it has not reported yet."""

    num_tickets: int = 0
    num_rows: int = 0
    num_tokens: int = 0


@dataclass(slots=True, frozen=True)
class Ticket:
    number: int
    num_rows: int
    num_tokens: int
    given_at: float


class Ledger:
    """Tickets per (frontend, engine), rising, and the sums of the outstanding ones per engine."""

    def __init__(self, epoch: int = 0) -> None:
        # A restarted coordinator must not give a number twice: its epoch is the high part.
        self._base = epoch << 40
        self._last: dict[tuple[str, int], int] = {}
        self._tickets: dict[tuple[str, int], deque[Ticket]] = {}
        self._sums: dict[int, Outstanding] = {}

    def outstanding(self, engine: int) -> Outstanding:
        """Read-only."""
        return self._sums.get(engine) or Outstanding()

    def give(self, front: str, engine: int, num_rows: int, num_tokens: int, now: float) -> int:
        """A new ticket of `front` for `engine`; `num_tokens` is the total of all its sequences."""
        key = (front, engine)
        number = self._last[key] = self._last.get(key, self._base) + 1
        self._tickets.setdefault(key, deque()).append(Ticket(number, num_rows, num_tokens, now))
        sums = self._sums.setdefault(engine, Outstanding())
        sums.num_tickets += 1
        sums.num_rows += num_rows
        sums.num_tokens += num_tokens
        return number

    def admit(self, engine: int, admitted: dict[str, int]) -> None:
        """From now on the engine's own report counts these tickets."""
        for front, highest in admitted.items():
            tickets = self._tickets.get((front, engine))
            while tickets and tickets[0].number <= highest:
                self._settle(engine, tickets.popleft())

    def release(self, front: str, engine: int, count: int) -> None:
        """`front` will not use `count` tickets. The newest are dropped: any later admission settles the older ones anyway."""
        tickets = self._tickets.get((front, engine))
        while tickets and count > 0:
            self._settle(engine, tickets.pop())
            count -= 1

    def forget_front(self, front: str) -> None:
        """The frontend is gone, and its unused tickets with it. Its numbers are still never reused."""
        for key in [key for key in self._last if key[0] == front]:
            self._base = max(self._base, self._last.pop(key))
            self._drop(key)

    def forget_engine(self, engine: int) -> None:
        """The engine was lost, and with it what was on its way to it."""
        for key in [key for key in self._tickets if key[1] == engine]:
            self._drop(key)

    def expire(self, now: float) -> int:
        """Drops tickets older than LEASE_S; returns how many."""
        num_expired = 0
        for (_, engine), tickets in self._tickets.items():
            while tickets and now - tickets[0].given_at > LEASE_S:
                self._settle(engine, tickets.popleft())
                num_expired += 1
        return num_expired

    def check(self) -> None:
        """Raises AssertionError unless the sums equal the tickets. For tests."""
        for engine, sums in self._sums.items():
            tickets = [t for (_, e), mine in self._tickets.items() if e == engine for t in mine]
            assert sums.num_tickets == len(tickets), (engine, sums, tickets)
            assert sums.num_rows == sum(t.num_rows for t in tickets), (engine, sums, tickets)
            assert sums.num_tokens == sum(t.num_tokens for t in tickets), (engine, sums, tickets)

    def _settle(self, engine: int, ticket: Ticket) -> None:
        sums = self._sums[engine]
        sums.num_tickets -= 1
        sums.num_rows -= ticket.num_rows
        sums.num_tokens -= ticket.num_tokens

    def _drop(self, key: tuple[str, int]) -> None:
        for ticket in self._tickets.pop(key, ()):
            self._settle(key[1], ticket)

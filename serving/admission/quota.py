"""What one caller may use: requests per minute in a sliding window, tokens per minute from a bucket.

Used by serving/admission/admission.py. Pure: the time is an argument. Libraries for this (limits, aiolimiter) read the clock
themselves, keep threads, or wait where a door has to refuse, so the two classes are ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

WINDOW_S = 60.0
NUM_SLOTS = 60
MAX_CALLERS = 10_000


class SlidingWindow:
    """At most `limit` in any WINDOW_S. Counts by slots, each of which counts until all of it is out of the window: so a place
    comes free up to one slot late, and never early."""

    def __init__(self, limit: int, window_s: float = WINDOW_S, num_slots: int = NUM_SLOTS) -> None:
        self.limit = limit
        self._slot_s = window_s / num_slots
        self._num_slots = num_slots
        self._slots: OrderedDict[int, int] = OrderedDict()  # slot number -> how many
        self._sum = 0

    def remaining(self, now: float) -> int:
        self._forget(now)
        return max(0, self.limit - self._sum)

    def wait_s(self, now: float) -> float:
        """Until the next one fits; 0: now."""
        self._forget(now)
        too_many = self._sum + 1 - self.limit
        if too_many <= 0:
            return 0.0
        for slot, count in self._slots.items():
            too_many -= count
            if too_many <= 0:
                return (slot + 1 + self._num_slots) * self._slot_s - now
        return self._num_slots * self._slot_s

    def take(self, now: float) -> None:
        slot = int(now / self._slot_s)
        self._slots[slot] = self._slots.get(slot, 0) + 1
        self._sum += 1

    def state(self) -> tuple[int, list[int]]:
        """The newest slot that counts, and the counts from it backwards, over a whole window."""
        newest = next(reversed(self._slots), 0)
        return newest, [self._slots.get(newest - i, 0) for i in range(self._num_slots + 1)]

    def restore(self, newest: int, counts: Sequence[int]) -> None:
        """Goes on from a `state`."""
        found = {newest - i: count for i, count in enumerate(counts) if count}
        self._slots = OrderedDict(sorted(found.items()))
        self._sum = sum(found.values())

    def _forget(self, now: float) -> None:
        oldest = int(now / self._slot_s) - self._num_slots
        while self._slots and next(iter(self._slots)) < oldest:
            self._sum -= self._slots.popitem(last=False)[1]


class TokenBucket:
    """Fills at `per_minute`, holds as much as one minute brings. What is taken may exceed what is there, because the length of
    an answer is known only at its end: the bucket is then in debt, and nothing more is let in until that is paid."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._rate = per_minute / 60.0
        self._level = float(per_minute)
        self._at: float | None = None

    def remaining(self, now: float) -> int:
        self._fill(now)
        return max(0, int(self._level))

    def wait_s(self, now: float) -> float:
        """Until there is a token; 0: now."""
        self._fill(now)
        return 0.0 if self._level >= 1.0 else (1.0 - self._level) / self._rate

    def take(self, now: float, count: int) -> None:
        self._fill(now)
        self._level -= count

    def state(self) -> tuple[float, float]:
        """How full it is, and since when."""
        return self._level, -1.0 if self._at is None else self._at

    def restore(self, level: float, at: float) -> None:
        """Goes on from a `state`."""
        self._level, self._at = min(level, float(self.per_minute)), None if at < 0 else at

    def _fill(self, now: float) -> None:
        if self._at is not None:
            self._level = min(float(self.per_minute), self._level + self._rate * max(0.0, now - self._at))
        self._at = now if self._at is None else max(self._at, now)


class Account(Protocol):
    """Of one caller. Times in seconds, of a clock that only rises."""

    def admit(self, now: float) -> tuple[str, float] | None:
        """Counts one request, or says which limit is reached and the seconds until one may come in."""

    def take_tokens(self, now: float, count: int) -> None: ...

    def headers(self, now: float) -> list[tuple[bytes, bytes]]: ...


class Accounts(Protocol):
    """By caller."""

    def of(self, caller: bytes, rates: Rates) -> Account | None: ...


class Rates(NamedTuple):
    """0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0


class Quota:
    """The account of one caller."""

    def __init__(self, rates: Rates) -> None:
        self.requests = SlidingWindow(rates.requests_per_minute) if rates.requests_per_minute else None
        self.tokens = TokenBucket(rates.tokens_per_minute) if rates.tokens_per_minute else None

    def refusal(self, now: float) -> tuple[str, float] | None:
        """Which limit is reached, in words, and the seconds until a request may come in; None: it may now."""
        waits = []
        if self.requests is not None and (wait_s := self.requests.wait_s(now)) > 0:
            waits.append((f"{self.requests.limit} requests per minute", wait_s))
        if self.tokens is not None and (wait_s := self.tokens.wait_s(now)) > 0:
            waits.append((f"{self.tokens.per_minute} tokens per minute", wait_s))
        return max(waits, key=lambda wait: wait[1], default=None)

    def admit(self, now: float) -> tuple[str, float] | None:
        """Counts one request, unless there is a `refusal`, which it returns."""
        refusal = self.refusal(now)
        if refusal is None:
            self.take_request(now)
        return refusal

    def take_request(self, now: float) -> None:
        if self.requests is not None:
            self.requests.take(now)

    def take_tokens(self, now: float, count: int) -> None:
        if self.tokens is not None:
            self.tokens.take(now, count)

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        """What is left, in the headers that OpenAI's API has for it."""
        found = []
        if self.requests is not None:
            found.append((b"x-ratelimit-limit-requests", self.requests.limit))
            found.append((b"x-ratelimit-remaining-requests", self.requests.remaining(now)))
        if self.tokens is not None:
            found.append((b"x-ratelimit-limit-tokens", self.tokens.per_minute))
            found.append((b"x-ratelimit-remaining-tokens", self.tokens.remaining(now)))
        return [(name, str(value).encode()) for name, value in found]


class Quotas:
    """Accounts by caller. Beyond MAX_CALLERS the one that was used longest ago is closed."""

    def __init__(self) -> None:
        self._accounts: OrderedDict[bytes, Quota] = OrderedDict()

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, caller: bytes, rates: Rates) -> Quota | None:
        """None for a caller without limits."""
        if not any(rates):
            return None
        account = self._accounts.get(caller)
        if account is None:
            account = self._accounts[caller] = Quota(rates)
            if len(self._accounts) > MAX_CALLERS:
                self._accounts.popitem(last=False)
        else:
            self._accounts.move_to_end(caller)
        return account

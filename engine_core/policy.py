"""Queue order and victim rules. A policy is a key function (smaller runs first) and a rule that picks whom to preempt.

Used by the scheduler, which knows no policy by name. Pure: keys depend on the request alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from engine_core.request import Request, State
from trireme.errors import ConfigError

Key: TypeAlias = tuple[int, ...]


class Policy(NamedTuple):
    """`key` orders the queue and the running rows and must be unique per request. `victim` picks one of the candidates
    (never empty), given the tokens each would have to compute again."""

    key: Callable[[Request], Key]
    victim: Callable[[list[Request], Callable[[Request], int]], Request]


def by_arrival(request: Request) -> Key:
    return (request.arrival,)


def least_work_lost(candidates: list[Request], lost: Callable[[Request], int]) -> Request:
    """Fewest tokens to compute again; among equals the latest arrival."""
    return min(candidates, key=lambda request: (lost(request), -request.arrival))


POLICIES: dict[str, Policy] = {"fcfs": Policy(by_arrival, least_work_lost)}


def find_policy(name: str) -> Policy:
    """Raises ConfigError that lists the known names."""
    if name not in POLICIES:
        raise ConfigError(f"there is no scheduling policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


class WaitingQueue:
    """Requests in policy order: a heap whose removed entries are dropped when they surface. All operations O(log n)."""

    def __init__(self, policy: Policy) -> None:
        self._key = policy.key
        self._heap: list[tuple[Key, Request]] = []
        self._live: dict[Key, Request] = {}
        self.num_tokens = 0  # known tokens of all queued requests
        self.num_preempted = 0  # of them, those that have run before

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return iter(self._live.values())

    def push(self, request: Request) -> None:
        key = self._key(request)
        self._live[key] = request
        self.num_tokens += request.num_tokens
        self.num_preempted += request.state is State.PREEMPTED
        heapq.heappush(self._heap, (key, request))

    def peek(self) -> Request | None:
        """The next request, or None."""
        heap = self._heap
        while heap and heap[0][0] not in self._live:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def discard(self, request: Request) -> None:
        """Takes a queued request out, wherever it stands."""
        del self._live[self._key(request)]
        self.num_tokens -= request.num_tokens
        self.num_preempted -= request.state is State.PREEMPTED
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.items())
            heapq.heapify(self._heap)

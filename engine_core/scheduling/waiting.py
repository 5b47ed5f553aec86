"""The queue of an engine: requests in the order of a policy, which may change with the service received.

Used by the scheduler. Requests queue in lanes (one per client, or a single one). Inside a lane the order is by `request.key`, set
on entry; between lanes it is by the lane's standing, which may grow at any time. So the queue is never sorted:

    lanes   [(standing, turn, lane), ...]     heap; an entry whose standing has grown is corrected when it surfaces
    a lane  [(key, request), ...]             heap; an entry whose request has left is dropped when it surfaces
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import chain, count
from typing import TypeAlias

from trireme.engine_core.scheduling.policies.base import Key, Policy
from trireme.engine_core.scheduling.request import Request, State

Entry: TypeAlias = tuple[float, int, Hashable]


class WaitingQueue:
    """All operations O(log n), amortized over stale entries. Iterates in no particular order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._lanes: dict[Hashable, _Lane] = {}
        self._entries: list[Entry] = []
        self._turns = count()
        self._floor = 0.0  # the least standing seen last
        self._num_requests = 0
        self.num_tokens = 0  # known tokens of all queued requests
        self.num_preempted = 0  # of them, those that have run before

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(lane.live.values() for lane in self._lanes.values())

    def push(self, request: Request) -> None:
        """Queues a request under its current key."""
        name = self._policy.lane(request)
        lane = self._lanes.get(name)
        if lane is None:
            self._policy.entered(name, self._floor)
            lane = self._lanes[name] = _Lane((self._policy.standing(name), next(self._turns), name))
            heapq.heappush(self._entries, lane.entry)
        request.key = (*self._policy.key(request), request.arrival_s, request.arrival)
        lane.push(request)
        self._num_requests += 1
        self.num_tokens += request.num_tokens
        self.num_preempted += request.state is State.PREEMPTED

    def peek(self) -> Request | None:
        """The next request, or None."""
        entries = self._entries
        while entries:
            entry = entries[0]
            lane = self._lanes.get(entry[2])
            if lane is None or lane.entry is not entry:
                heapq.heappop(entries)
                continue
            standing = self._policy.standing(entry[2])
            if standing > entry[0]:
                lane.entry = (standing, next(self._turns), entry[2])
                heapq.heapreplace(entries, lane.entry)
                continue
            self._floor = max(self._floor, standing)
            return lane.peek()
        return None

    def first(self, count: int) -> list[Request]:
        """The next request and up to `count` - 1 that follow it in its lane, in order. O(n) in the lane."""
        head = self.peek()
        if head is None:
            return []
        live = self._lanes[self._policy.lane(head)].live
        return [live[key] for key in heapq.nsmallest(count, live)]

    def num_ahead(self, request: Request) -> int:
        """How many queued requests would go before one that is about to be queued. O(n)."""
        policy = self._policy
        name = policy.lane(request)
        own = policy.standing(name) if name in self._lanes else max(self._floor, policy.standing(name))
        place = (own, (*policy.key(request), request.arrival_s, request.arrival))
        return sum(
            (standing, key) < place
            for lane_name, lane in self._lanes.items()
            for standing in (policy.standing(lane_name),)
            for key in lane.live
        )

    def discard(self, request: Request) -> None:
        """Removes a queued request from any position."""
        name = self._policy.lane(request)
        lane = self._lanes[name]
        lane.discard(request)
        self._num_requests -= 1
        self.num_tokens -= request.num_tokens
        self.num_preempted -= request.state is State.PREEMPTED
        if not lane.live:
            del self._lanes[name]
            if len(self._entries) > 2 * len(self._lanes) + 64:
                self._entries = [left.entry for left in self._lanes.values()]
                heapq.heapify(self._entries)


class _Lane:
    """Requests ordered by key alone. `entry` is its entry in the heap of lanes."""

    __slots__ = ("_heap", "entry", "live")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.live: dict[Key, Request] = {}
        self._heap: list[tuple[Key, Request]] = []

    def push(self, request: Request) -> None:
        self.live[request.key] = request
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request:
        while self._heap[0][0] not in self.live:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def discard(self, request: Request) -> None:
        del self.live[request.key]
        if len(self._heap) > 2 * len(self.live) + 64:
            self._heap = list(self.live.items())
            heapq.heapify(self._heap)

"""The coordinator without its sockets: events in, answers out. Joins members, ledger and router.

Pure (time and randomness are passed in), so that the same code runs in production, in unit tests and under virtual time.
Called by main.py. Request payloads never pass through here.
"""

from __future__ import annotations

import random

from trireme.coordinator.ledger import Ledger, WatchedTime
from trireme.coordinator.members import Members
from trireme.coordinator.prefix import Match, PrefixIndex
from trireme.coordinator.router import CACHE_WORTH, POLICIES, Ask, cost_of, same_zone
from trireme.coordinator.stealing import Stealing
from trireme.coordinator.waves import Waves
from trireme.hashing import unpacked_keys
from trireme.topology.zones import Topology
from trireme.transport.wire.messages import GiveBack, KVEvents, Load, Member, Released, Route, Routed, View, WaveReport


class Coordinator:
    """Soft state: after a restart (with a higher `epoch`) everything is rebuilt from the engines' next reports."""

    def __init__(
        self,
        num_engines: int,
        balance: str,
        rng: random.Random,
        *,
        epoch: int = 0,
        fleet: Topology | None = None,
        block_size: int = 16,
        steals_for: int = 0,
        in_lockstep: bool = False,
    ) -> None:
        """`steals_for` is the number of sequences that an engine runs at once; 0: no work stealing."""
        self.fleet = fleet or Topology()
        self.block_size = block_size
        self.members = Members(num_engines)
        self.ledger = Ledger(epoch)
        self.prefixes = PrefixIndex(num_engines, self.fleet.far(num_engines))
        self._lease_time = WatchedTime()
        self.waves = Waves(num_engines, epoch) if in_lockstep else None
        self.changed = True  # the View is out of date; the publisher clears it
        self._stealing = Stealing(steals_for)
        self._choose = POLICIES[balance](rng)
        self._view_seq = epoch << 40
        self.num_routed = self.num_refused = self.num_expired = 0

    def engine_connected(self, engine: int, epoch: int) -> None:
        """Engine `engine` said Hello. Unknown engines and replaced epochs are ignored."""
        if engine in self.members and self.members.connected(engine, epoch):
            self.ledger.forget_engine(engine)
            self.prefixes.forget(engine)
            self.changed = True
            if self.waves is not None:
                self.waves.connected(engine, epoch)

    def engine_cached(self, events: KVEvents) -> bool:
        """Updates the prefix index. False when the engine must report all its blocks again."""
        if events.engine not in self.members or self.members[events.engine].epoch != events.epoch:
            return True
        return self.prefixes.apply(events)

    def engine_reported(self, load: Load) -> None:
        if load.engine in self.members and self.members.reported(load):
            self.ledger.admit(load.engine, load.admitted)
            self.changed = True

    def engine_lost(self, engine: int, epoch: int, reason: str) -> None:
        """The connection of that life ended: forgets its outstanding tickets and its prefixes. Ignored for an old epoch."""
        if engine in self.members and self.members.lost(engine, epoch, reason):
            self.ledger.forget_engine(engine)
            self.prefixes.forget(engine)
            self.changed = True
            if self.waves is not None:
                self.waves.lost(engine, epoch)

    def wave_reported(self, report: WaveReport) -> None:
        if self.waves is not None and report.engine in self.members:
            self.waves.reported(report)

    def front_lost(self, front: str) -> None:
        self.ledger.forget_front(front)
        self.changed = True

    def route(self, front: str, route: Route, now: float) -> Routed:
        """An engine and a ticket for it, or the reason why there is none."""
        ready = self._reachable(front, self.members.ready())
        if route.pin >= 0:
            refusal = self._objection_to_pin(route.pin)
            ready = [route.pin]
        else:
            refusal = "" if ready else f"none of {len(self.members)} engines is ready: {self._why_none()}"
        if refusal:
            self.num_refused += 1
            return Routed(route.rid, engine=-1, epoch=-1, ticket=0, error=refusal)
        match = self.prefixes.match(unpacked_keys(route.prefix), ready) if route.prefix else None
        engine = self._choose(self._ask(ready, route, match)) if len(ready) > 1 else ready[0]
        num_rows = max(1, route.num_choices)
        num_tokens = self._uncached(engine, route, match)
        ticket = self.ledger.give(front, engine, num_rows, num_rows * num_tokens, self._lease_time.at(now))
        self.num_routed += 1
        self.changed = True
        return Routed(route.rid, engine, self.members[engine].epoch, ticket)

    def released(self, front: str, released: Released) -> None:
        if released.engine in self.members and self.members[released.engine].epoch == released.epoch:
            self.ledger.release(front, released.engine, released.count)
            self.changed = True

    def orders(self, now: float) -> list[GiveBack]:
        """Which engines must return waiting sequences, for others that have room. Called at most every few milliseconds."""
        groups: dict[int, list[Load]] = {}
        for engine in self.members:
            if engine.state == "ready" and engine.load is not None:
                groups.setdefault(self.fleet.group(engine.index), []).append(engine.load)
        return [
            order for loads in groups.values() for order in self._stealing.orders(loads, self.ledger.outstanding, now)
        ]

    def expire(self, now: float) -> None:
        """Drops expired tickets. Called about once a second."""
        expired = self.ledger.expire(self._lease_time.at(now))
        if expired:
            self.num_expired += expired
            self.changed = True

    def cost(self, engine: int) -> float:
        """Work in tokens ahead of a new request at `engine`, relative to its size."""
        return cost_of(self.members[engine].load, self.ledger.outstanding(engine)) / self.fleet.weight(engine)

    def view(self) -> View:
        """Membership and load for the frontends."""
        self._view_seq += 1
        return View(
            self._view_seq,
            [
                Member(e.index, e.epoch, e.state, e.load, self.ledger.outstanding(e.index).num_rows)
                for e in self.members
            ],
        )

    def _reachable(self, front: str, ready: list[int]) -> list[int]:
        """The engines of `ready` that this frontend is connected to."""
        group = self.fleet.group_of_front(front)
        return ready if group < 0 else [engine for engine in ready if self.fleet.group(engine) == group]

    def _ask(self, ready: list[int], route: Route, match: Match | None) -> Ask:
        near = self.fleet.labelled(route.label, ready)
        engines = same_zone(ready, near, self.cost) if near else ready
        if match is None:
            return Ask(engines, self.cost, self.fleet.weights)

        def cost(engine: int) -> float:
            left = CACHE_WORTH * self._uncached(engine, route, match)
            return self.cost(engine) + left / self.fleet.weight(engine)

        return Ask(engines, cost, self.fleet.weights, match.owners(engines))

    def _uncached(self, engine: int, route: Route, match: Match | None) -> int:
        """Prompt tokens that `engine` would have to compute."""
        num_cached = match.depth(engine) * self.block_size if match is not None else 0
        return max(0, route.num_tokens - num_cached)

    def _objection_to_pin(self, pin: int) -> str:
        if pin not in self.members:
            return f"there is no engine {pin}; the engines are 0..{len(self.members) - 1}"
        engine = self.members[pin]
        return "" if engine.state == "ready" else f"engine {pin} is {engine.state}: {engine.reason}"

    def _why_none(self) -> str:
        return "; ".join(f"engine {e.index} is {e.state}, {e.reason}" for e in list(self.members)[:4])

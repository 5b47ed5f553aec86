"""What must be true in every world, written down as it happens: who asked, what came, what went in and out of each part.

A Breach names the promise that was broken. Nothing here changes what the parts do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tests.sim.scene import MAX_LEN, VOCAB, Ask
from trireme.coordinator.ledger import AWAY_S, LEASE_S
from trireme.coordinator.simulation.cost_model import expected_tokens
from trireme.engine_core.executor.base import WorkerLost
from trireme.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    QuarantinedError,
    RequestError,
    TriremeError,
)
from trireme.serving.engines.client import ENGINE_WAIT_S, MIGRATION_LIMIT
from trireme.serving.engines.stream import PromptLogprobs
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.columns import unpack_ids
from trireme.transport.wire.messages import Abort, End, First, Load, LogprobRow, Released, Routed, StepOutputs, Submit

if TYPE_CHECKING:
    from tests.sim.hosts import CoordinatorHost, EngineHost, FrontHost
    from tests.sim.world import World

ROUTING_S = 5.0  # R6
LATE_S = 0.51  # after its deadline a request may still be told of


class Breach(AssertionError):
    """A promise was broken; the text says which one and how."""


class Answer:
    """One request as its reader sees it."""

    def __init__(self, world: World, ask: Ask) -> None:
        self.world = world
        self.ask = ask
        self.host: FrontHost | None = None
        self.outcome = "coming"  # running, complete, error, refused, cancelled, gone (with its front end)
        self.began_at = 0.0
        count = len(ask.replays)
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.ends: list[End | None] = [None] * count
        self.num_scores = [0] * count
        self.num_firsts = [0] * count
        self.aborted: set[int] = set()
        self._expected = [
            expected_tokens(replay.prompt.tolist(), replay.params, VOCAB, MAX_LEN) for replay in ask.replays
        ]

    @property
    def is_over(self) -> bool:
        return self.outcome not in ("coming", "running")

    def begin(self) -> None:
        self.outcome, self.began_at = "running", self.world.timeline.now

    def placed(self) -> None:
        took = self.world.timeline.now - self.began_at
        if self.world.scene.only_coordinator and took > ROUTING_S:
            raise Breach(f"R6: request {self.ask.index} waited {took:.2f} s for an engine without its coordinator")

    def take(self, index: int, event: Any) -> None:
        """One event of one choice. Raises Breach."""
        who = f"request {self.ask.index} choice {index}"
        if self.ends[index] is not None or index in self.aborted:
            raise Breach(f"R1: {who} got {event} after its end")
        if isinstance(event, int):
            place, expected = len(self.tokens[index]), self._expected[index]
            if place >= len(expected) or expected[place] != event:
                raise Breach(f"tokens: {who} got {event} at {place} of {expected}, after {self.tokens[index]}")
            self.tokens[index].append(event)
        elif isinstance(event, LogprobRow):
            if event.token_ids[0, 0] != self._expected[index][self.num_scores[index]]:
                raise Breach(f"tokens: {who} got log-probabilities of another token")
            self.num_scores[index] += 1
        elif isinstance(event, End):
            self.ends[index] = event
            self._check_end(who, index, event)
        elif isinstance(event, First):
            self.num_firsts[index] += 1
        elif not isinstance(event, PromptLogprobs):
            raise Breach(f"{who} got {event}")

    def stopping(self) -> list[int]:
        """Choices whose stop string has been found by now."""
        found = [
            index
            for index, count in self.ask.stops_at.items()
            if len(self.tokens[index]) >= count and self.ends[index] is None and index not in self.aborted
        ]
        self.aborted.update(found)
        return found

    def ended(self) -> None:
        open_ones = [i for i, end in enumerate(self.ends) if end is None and i not in self.aborted]
        if open_ones:
            raise Breach(f"R1: request {self.ask.index} is over, but choices {open_ones} never ended")
        if self.world.scene.only_coordinator and any(replay.num_moves for replay in self.ask.replays):
            raise Breach(f"R6: request {self.ask.index} was moved, although every engine was well")
        took = self.world.timeline.now - self.began_at
        if 0 < self.ask.total_s < took - LATE_S and not self._may_sleep:
            raise Breach(f"R13: request {self.ask.index} took {took:.2f} s, its deadline was {self.ask.total_s} s")
        failed = any(end is not None and end.reason == "error" for end in self.ends)
        self.outcome = "error" if failed else "complete"

    def left(self) -> None:
        self.outcome = "cancelled"

    def refused(self, error: TriremeError) -> None:
        self.outcome = "refused"
        self._check_error(f"request {self.ask.index}", error.code, error.message, 0)

    def _check_end(self, who: str, index: int, end: End) -> None:
        if end.reason == "abort":
            raise Breach(f"R1: {who} was aborted by nobody")
        if end.reason == "error":
            self._check_error(who, end.error_code, end.error, self.ask.replays[index].num_moves)
            return
        if self.tokens[index] != self._expected[index]:
            raise Breach(f"tokens: {who} ended with {self.tokens[index]} of {self._expected[index]}")
        if self.ask.replays[index].params.logprobs >= 0 and self.num_scores[index] != len(self.tokens[index]):
            raise Breach(f"tokens: {who} has {self.num_scores[index]} log-probabilities of {len(self.tokens[index])}")
        if self.num_firsts[index] != 1:
            raise Breach(f"R1: {who} was told {self.num_firsts[index]} times what its prompt cost")

    @property
    def _may_sleep(self) -> bool:
        """Its front end may be slow to tell."""
        return any(self.ask.front in fault.targets for fault in self.world.scene.faults)

    @property
    def _is_late(self) -> bool:
        """Its time is up by the true clock, or may be by one that leapt."""
        took = self.world.timeline.now - self.began_at
        return 0 < self.ask.total_s <= took + 1e-6 or any(fault.kind == "jump" for fault in self.world.scene.faults)

    def _check_error(self, who: str, code: str, text: str, num_moves: int) -> None:
        """Only what this request or its engines did to it may end it."""
        scene, ask = self.world.scene, self.ask
        assert self.host is not None
        losses = sum(link.num_losses for link in self.host.links if link.target != "coordinator")
        if code in (RequestError.code, ContextLengthError.code):
            is_fair = ask.is_bad
        elif code == OverloadedError.code:
            was_accepted = num_moves > 0 and not scene.limits.queue_timeout
            is_draining = "shutting down" in text and any(fault.kind == "drain" for fault in scene.faults)
            is_fair = (scene.is_tight and not was_accepted) or is_draining
        elif code == QuarantinedError.code:
            is_fair = losses >= 2
        elif code == DeadlineError.code:
            is_fair = self._is_late
        elif code == EngineDeadError.code:
            is_moved_enough = num_moves > MIGRATION_LIMIT and losses > MIGRATION_LIMIT
            is_fair = (
                is_moved_enough or sum(self.host.process.leaps) > ENGINE_WAIT_S
            )  # which its front end takes for waiting
        else:
            is_fair = ask.is_faulty and code == EngineError.code
        if not is_fair:
            raise Breach(f"R1: {who} ended without reason: {code}: {text} ({num_moves} moves, {losses} engines lost)")


class EngineBook:
    """What one life of an engine was given and has said."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._open: dict[tuple[bytes, int], None] = {}
        self._unwanted: dict[tuple[str, int], None] = {}
        self.num_submits = self.num_ends = self.num_silent = 0
        host.server.on_heard = self.heard
        host.server.on_sent = self.sent

    def heard(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Submit):
            self._host.world.books.tickets.arrived(self._host, peer, message.ticket)
            key = (peer.routing_id, message.rid)
            self._unwanted.pop((peer.name, message.rid), None)
            if key not in self._open:
                self._open[key] = None
                self.num_submits += 1
        elif isinstance(message, Disconnected):
            gone = [key for key in self._open if key[0] == peer.routing_id]
            self.num_silent += len(gone)
            for key in gone:
                del self._open[key]
                self._unwanted[peer.name, key[1]] = None
        elif isinstance(message, Abort):
            self._unwanted.update({(peer.name, rid): None for rid in message.rids})

    def check_gone(self) -> None:
        """R14: a row that nobody wants any more has given up what it held. Raises Breach."""
        kept = [key for key in self._unwanted if key in self._host.core.requests]
        if kept:
            raise Breach(f"R14: {self._host.process.name} goes on with {kept}, which nobody wants")
        self._unwanted.clear()

    def sent(self, peer: Peer, message: Any) -> None:
        if not isinstance(message, StepOutputs):
            return
        for rid in unpack_ids(message.rids).tolist():
            if (peer.routing_id, rid) not in self._open:
                raise Breach(f"R1: {self._host.process.name} sent a token of row {peer.name}/{rid} after its end")
        for rid in (*(end.rid for end in message.ends), *(returned[0] for returned in message.returned)):
            self.num_ends += 1
            if self._open.pop((peer.routing_id, rid), self) is self:
                raise Breach(f"R1: {self._host.process.name} ended row {peer.name}/{rid} twice")

    def check_quiet(self) -> None:
        """R14, R20: nothing is left, and what came in went out. Raises Breach."""
        name, core = self._host.process.name, self._host.core
        if core.requests or self._open:
            raise Breach(f"R14: {name} keeps {sorted(core.requests)}, untold {sorted(self._open)} when all is quiet")
        audit = core.audit()
        if audit.num_free + audit.num_cached != audit.num_blocks:
            raise Breach(f"R14: {name} has {audit.num_free} + {audit.num_cached} of {audit.num_blocks} blocks")
        core.check_idle()
        totals = core.counters
        ended = totals.stop + totals.length + totals.abort + totals.error + totals.returned
        if not totals.submitted == ended == self.num_submits == self.num_ends + self.num_silent:
            raise Breach(
                f"R20: {name} took {self.num_submits} rows, counted {totals.submitted}, ended {ended}, "
                f"told {self.num_ends} and {self.num_silent} had nobody to tell"
            )


class Tickets:
    """Which tickets the coordinator gave and no engine has seen yet: the truth that its ledger must not fall short of."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._given: dict[tuple[str, int], dict[int, tuple[float, int]]] = {}  # when, after how many leaps
        self._num_released: dict[tuple[str, int], int] = {}

    def gave(self, front: str, routed: Routed, leaps: Sequence[float]) -> None:
        if routed.engine >= 0:
            given = self._world.timeline.now, len(leaps)
            self._given.setdefault((front, routed.engine), {})[routed.ticket] = given

    def arrived(self, host: EngineHost, peer: Peer, ticket: int) -> None:
        """An engine counts this ticket from now on, and with it all older ones."""
        tickets = self._given.get((peer.name, host.index), {})
        for number in [number for number in tickets if number <= ticket]:
            del tickets[number]

    def released(self, front: str, message: Released, is_current: bool) -> None:
        if is_current:
            key = (front, message.engine)
            self._num_released[key] = self._num_released.get(key, 0) + message.count

    def forget(self, *, front: str | None = None, engine: int | None = None) -> None:
        for table in (self._given, self._num_released):
            for key in [key for key in table if front in (None, key[0]) and engine in (None, key[1])]:
                del table[key]  # type: ignore[attr-defined]

    def check(self, ledger: Any, leaps: Sequence[float]) -> None:
        """B1: no fresh decision is forgotten. A leap of the coordinator's clock takes from no lease, but for one so short that
        it passes for time. Raises Breach."""
        now = self._world.timeline.now

        def age_s(given_at: float, num_leaps: int) -> float:
            return now - given_at + sum(leap for leap in leaps[num_leaps:] if leap <= AWAY_S)

        for key, tickets in self._given.items():
            fresh = sum(1 for given in tickets.values() if age_s(*given) < LEASE_S - 1)
            known = len(ledger._tickets.get(key, ()))
            if fresh - self._num_released.get(key, 0) > known:
                raise Breach(f"ledger: {fresh} tickets of {key[0]} are under way to engine {key[1]}, it knows {known}")


class CoordinatorBook:
    """What one life of the coordinator hears and says, and that its ledger adds up after each of it."""

    def __init__(self, host: CoordinatorHost, tickets: Tickets) -> None:
        self._host = host
        self._tickets = tickets
        tickets.forget()
        host.server.on_heard = self.heard
        host.server.on_sent = self.sent

    def heard(self, peer: Peer, message: Any) -> None:
        self.check()
        if isinstance(message, Load):
            self._check_gauges(message)
        elif isinstance(message, Released):
            engine = self._host.core.members[message.engine]
            self._tickets.released(peer.name, message, engine.epoch == message.epoch)
        elif isinstance(message, Disconnected) or (peer.role == "engine" and not isinstance(message, Load)):
            if peer.role == "front":
                self._tickets.forget(front=peer.name)
            else:
                self._tickets.forget(engine=int(peer.name.rpartition("-")[2]))

    def sent(self, peer: Peer, message: Any) -> None:
        if isinstance(message, Routed):
            self._tickets.gave(peer.name, message, self._host.process.leaps)

    def check(self) -> None:
        """Raises Breach."""
        ledger = self._host.core.ledger
        try:
            ledger.check()
        except AssertionError as error:
            raise Breach(f"ledger: its sums are wrong: {error}") from error
        self._tickets.check(ledger, self._host.process.leaps)

    def check_quiet(self) -> None:
        for engine in self._host.core.members:
            found = self._host.core.ledger.outstanding(engine.index)
            if found.num_tickets or found.num_rows or found.num_tokens:
                raise Breach(f"ledger: {found} are under way to engine {engine.index} when all is quiet")
            load = engine.load
            if engine.state != "ready" or load is None:
                raise Breach(f"members: engine {engine.index} is {engine.state} when all is quiet: {engine.reason}")
            if load.num_running or load.num_waiting or load.blocks_used or load.waiting_tokens or load.running_tokens:
                raise Breach(f"R20: {load} when all is quiet")

    def _check_gauges(self, load: Load) -> None:
        numbers = {name: getattr(load, name) for name in Load.__struct_fields__ if name not in ("admitted",)}
        low = {name: value for name, value in numbers.items() if isinstance(value, int | float) and value < 0}
        if low or load.blocks_used > load.num_blocks:
            raise Breach(f"R20: engine {load.engine} reports {low or load}")


class Books:
    """All of it, for one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tickets = Tickets(world)
        self.engines: dict[str, EngineBook] = {}
        self.coordinator: CoordinatorBook | None = None
        self.failure: BaseException | None = None

    def note_task(self, task: asyncio.Task[None]) -> None:
        """Somebody's task is over; what it raised is raised again at the world's next event."""
        if not task.cancelled() and task.exception() is not None:
            self.failure = self.failure or task.exception()

    def open_engine(self, host: EngineHost) -> EngineBook:
        book = self.engines[host.process.name] = EngineBook(host)
        return book

    def open_coordinator(self, host: CoordinatorHost) -> None:
        self.coordinator = CoordinatorBook(host, self.tickets)

    def check_death(self, host: EngineHost, error: EngineError) -> None:
        """An engine ends itself for a worker that died or is stuck, and for nothing else."""
        is_stuck = host.executor.is_stuck or host.process.has_lost_time
        if not (isinstance(error, WorkerLost) or ("stuck" in error.message and is_stuck)):
            raise Breach(f"engine: {host.process.name} gave up: {error.code}: {error.message}")

    def check_front(self, host: FrontHost) -> None:
        """R20: what a front end counts is what it has."""
        if self.failure is not None:
            raise self.failure
        for engine in host.client._engines:
            own = host.client._placement.fallback_router._own.get(engine.index, 0)
            if own != len(engine.choices):
                raise Breach(
                    f"R20: {host.process.name} counts {own} choices on engine {engine.index}: {len(engine.choices)}"
                )
        if host.loop.errors:
            raise Breach(f"front: {host.process.name}: {host.loop.errors[0]}")

    def check_quiet(self, hosts: list[FrontHost]) -> None:
        """Everything has ended and every message has arrived."""
        for host in hosts:
            client = host.client
            if client.num_choices or client._placement.routes or len(client._resubmissions):
                raise Breach(f"R20: {host.process.name} has {client.num_choices} choices when all is quiet")
        for book in self.engines.values():
            book.check_quiet()
        if self.coordinator is not None:
            self.coordinator.check()
            self.coordinator.check_quiet()

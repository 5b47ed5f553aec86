"""The product's own shells around the machines of waves, moved by the events of wave_model: one thread, no socket, no clock.

What the model does with bare machines, these do with the coordinator's CoordinatorShell and with engines' loops, cores and
fake workers.
`Shells.follow` carries out an event of the model, `Shells.difference` says where the two are not in the same state afterwards.
A loop steps as soon as it may, so the model's votes follow at once (`walk`).
"""

from __future__ import annotations

import os
import random
import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from tests.sim.explore import Move
from tests.sim.hosts import TurningPoller
from tests.sim.wave_model import Collective, Outside, Rank, Setting, WaveModel, World
from tests.unit.engine_driver import make_limits, make_worker
from trireme.coordinator.core import Coordinator
from trireme.coordinator.shell import CoordinatorShell, engine_index
from trireme.engine_core import main as engine_main
from trireme.engine_core.core import EngineCore
from trireme.engine_core.lifecycle.stepping import Lockstep
from trireme.engine_core.lifecycle.wave import Wave
from trireme.engine_core.loop import EngineLoop
from trireme.params import RowParams
from trireme.topology.lockstep import Agreed, Ballot, agree
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import (
    PROTOCOL_VERSION,
    Call,
    CallReply,
    Hello,
    StepPlan,
    StepResult,
    Submit,
    WaveOrder,
    WaveReport,
    Welcome,
)
from trireme.workers.fake import FakeOptions

LIMITS = make_limits()
RANK = re.compile(r"(?:of )?rank (\d+)")


class Inbox:
    """A bound socket, or a connection: what has arrived is taken by `receive`, what is sent is given to `carry`."""

    progress = 0
    stalled = ""
    peers: dict[str, Peer] = {}

    def __init__(self, carry: Any = None) -> None:
        self._arrived: deque[Any] = deque()
        self._carry = carry

    @property
    def has_input(self) -> bool:
        return bool(self._arrived)

    def put(self, message: Any) -> None:
        self._arrived.append(message)

    def receive(self, limit: int = 1024) -> Iterator[Any]:
        while self._arrived:
            yield self._arrived.popleft()

    def send(self, peer: Peer, message: Any) -> bool:
        if self._carry is not None:
            self._carry(peer, message)
        return True

    def broadcast(self, message: Any, role: Any = None) -> None:
        pass

    def counts(self) -> dict[str, int]:
        return {}


class HeldWorker:
    """An executor whose answers come when the collective of their step is over."""

    def __init__(self, *, ahead: bool) -> None:
        self._worker = make_worker(LIMITS, FakeOptions(), ahead=ahead)
        self._over: list[StepResult] = []
        self._under_way: deque[StepResult] = deque()
        self.entered: deque[Ballot] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert plan.ballot is not None
        result = self._worker.execute(plan)
        assert result is not None
        self._under_way.append(result)
        self.entered.append(plan.ballot)

    def learn(self, agreed: Agreed) -> None:
        self._over.append(msgspec.structs.replace(self._under_way.popleft(), agreed=agreed))

    def take_results(self) -> list[StepResult]:
        over, self._over = self._over, []
        return over

    def halted(self) -> str:
        return ""

    def starved_s(self) -> float:
        return 0.0


class EngineShell:
    """One life of an engine: its loop with all that is pure inside."""

    def __init__(self, rank: int, epoch: int, depth: int, kind: type[Wave], tell: Any) -> None:
        self.peer = Peer(f"engine-{rank}", "engine", epoch, os.getpid(), b"%d.%d" % (rank, epoch))
        self.worker = HeldWorker(ahead=depth > 1)
        self.core = EngineCore(LIMITS, engine=rank, epoch=epoch, depth=depth, ahead=depth > 1, check=True)
        self.wave = kind(rank, epoch, depth)
        self.fronts, self.coordinator = Inbox(), Inbox()
        poller = TurningPoller()
        stepping = Lockstep(self.core, self.wave, tell)
        self.loop = EngineLoop(
            self.core,
            self.worker,  # type: ignore[arg-type]
            self.fronts,  # type: ignore[arg-type]
            poller,  # type: ignore[arg-type]
            stepping=stepping,
            clock=lambda: 0.0,
        )
        poller.add(self.coordinator, lambda: engine_main._on_coordinator(self.coordinator, self.loop))  # type: ignore[arg-type]
        self.turn = lambda: (poller.call_back(), self.loop.turn())

    def hear(self, message: Any) -> None:
        self.coordinator.put(message)
        self.turn()

    def submit(self, number: int, steps: int) -> None:
        params = RowParams(max_tokens=steps, temperature=0.0)
        front = Peer("front-0", "front", 0, os.getpid(), b"front")
        self.fronts.put((front, Submit(number + 1, np.array([5, 6, 7], np.int32), params)))
        self.turn()


class Shells:
    """A coordinator and its engines, and all that is on its way between them."""

    def __init__(self, setting: Setting, *, wave: type[Wave] = Wave) -> None:
        self._depth, self._kind = setting.depth, wave
        self.engines: list[EngineShell | None] = [None] * setting.ranks
        self.ups: list[deque[tuple[Peer, Any]]] = [deque() for _ in range(setting.ranks)]
        self.downs: list[deque[WaveOrder]] = [deque() for _ in range(setting.ranks)]
        self.outcomes: list[deque[Agreed]] = [deque() for _ in range(setting.ranks)]
        self.calls: dict[int, int] = {}  # of clients, by number
        self.is_welcome = [False] * setting.ranks
        self.is_broken = False
        self._epoch = 0
        self._num_calls = 0
        self._begin_coordinator(0)
        for rank in range(setting.ranks):
            self._begin_engine(rank)

    def follow(self, event: str, before: World, model: WaveModel) -> None:
        """Carries out an event that the model allows in the state `before`."""
        found = RANK.search(event)
        rank = int(found[1]) if found else -1
        if event.endswith("is up"):
            self._begin_engine(rank)
        elif event.startswith("coordinator hears"):
            self._at_coordinator(*self.ups[rank].popleft())
        elif event.endswith("meet"):
            engine = self._engine(rank)
            self._at_coordinator(
                engine.peer, Hello(PROTOCOL_VERSION, b"", "engine", engine.peer.name, engine.peer.epoch, 0)
            )
            self.is_welcome[rank] = True
            engine.hear(Welcome(PROTOCOL_VERSION, b"", "coordinator", "coordinator", 0, 0))
        elif " hears " in event:
            self._engine(rank).hear(self.downs[rank].popleft())
        elif " learns " in event:
            self._engine(rank).worker.learn(self.outcomes[rank].popleft())
            self._engine(rank).turn()
        elif event.endswith(("crashes", "is ended with its group")):
            self.ups[rank].append((self._engine(rank).peer, Disconnected("it died")))
            self.downs[rank].clear()
            self.engines[rank] = None
            self.is_broken = True
        elif event == "the group starts again":
            self._epoch, self.is_broken = self._epoch + 1, False
            self.is_welcome = [False] * len(self.engines)
            for outcomes in self.outcomes:
                outcomes.clear()
        elif event.startswith("request"):
            outside: Outside = model.part(before.outside)
            number = int(event.split()[1])
            self._engine(rank).submit(number, next(need for n, _, need in outside.arrivals if n == number))
        elif event.startswith("client"):
            self._ask(int(event.split()[1]), event.split()[-1])
        elif event == "the coordinator is replaced":
            outside = model.part(before.outside)
            self._begin_coordinator(outside.serial + 1)
        else:
            raise AssertionError(f"an event that nobody knows: {event}")
        self._meet_in_collective()

    def difference(self, world: World, model: WaveModel) -> str:
        """Where these and the model are not in the same state; "" when they are."""
        pairs = [("coordinator", model.freeze(self.core.waves), model.part(world.coordinator))]
        outside: Outside = model.part(world.outside)
        pairs.append(("calls", sorted(self.calls), [c for c, client in enumerate(outside.clients) if client.number]))
        collective: Collective = model.part(world.collective)
        for i, engine in enumerate(self.engines):
            rank: Rank = model.part(world.ranks[i])
            ups = tuple(("left", peer.epoch) if isinstance(m, Disconnected) else m for peer, m in self.ups[i])
            pairs += [
                (f"from rank {i}", ups, model.part(world.ups[i])),
                (f"to rank {i}", tuple(self.downs[i]), model.part(world.downs[i])),
                (f"rank {i} lives", engine is not None, rank.is_alive),
            ]
            if engine is not None and rank.is_alive:
                pairs += self._of_rank(i, engine, rank, collective, model)
        return next((f"{what}: shells {ours}, model {theirs}" for what, ours, theirs in pairs if ours != theirs), "")

    def _of_rank(
        self, i: int, engine: EngineShell, rank: Rank, collective: Collective, model: WaveModel
    ) -> list[tuple[str, Any, Any]]:
        wave = model.freeze(engine.wave)
        at = 0 if rank.is_welcome else 1  # what was reported to a coordinator that is gone does not matter
        return [
            (f"wave of rank {i}", wave[at:], rank.wave[at:]),
            (f"rows of rank {i}", len(engine.core.requests), len(rank.rows)),
            (f"begun at rank {i}", engine.core.scheduler.num_begun, sum(row.planned > 0 for row in rank.rows)),
            (f"ballots of rank {i}", list(engine.worker.entered), [vote.ballot for vote in collective.entered[i]]),
            (f"outcomes for rank {i}", list(self.outcomes[i]), [o.agreed for o in collective.outcomes[i]]),
        ]

    # ------------------------------------------------------------ parts

    def _engine(self, rank: int) -> EngineShell:
        engine = self.engines[rank]
        assert engine is not None
        return engine

    def _begin_engine(self, rank: int) -> None:
        def tell(report: WaveReport) -> bool:
            if self.is_welcome[rank]:
                self.ups[rank].append((self._engine(rank).peer, report))
            return self.is_welcome[rank]

        self.engines[rank] = EngineShell(rank, self._epoch, self._depth, self._kind, tell)

    def _begin_coordinator(self, serial: int) -> None:
        """What was on its way from and to the old one is lost."""
        size = len(self.engines)
        self.core = Coordinator(size, "p2c", random.Random(0), epoch=serial, in_lockstep=True)
        self._inbox = Inbox(self._from_coordinator)
        self._shell = CoordinatorShell(self.core, self._inbox, clock=lambda: 0.0)
        self.is_welcome = [False] * size
        self.calls.clear()
        for link in (*self.ups, *self.downs):
            link.clear()

    def _at_coordinator(self, peer: Peer, message: Any) -> None:
        self._inbox.put((peer, message))
        self._shell.on_messages()

    def _from_coordinator(self, peer: Peer, message: Any) -> None:
        if isinstance(message, WaveOrder):
            rank = engine_index(peer.name)
            if self.engines[rank] is not None:
                self.downs[rank].append(message)
        elif isinstance(message, CallReply):
            self.calls = {client: call_id for client, call_id in self.calls.items() if call_id != message.call_id}

    def _ask(self, client: int, what: str) -> None:
        self._num_calls += 1
        self.calls[client] = self._num_calls
        call = Call(self._num_calls, "resume") if what == "resume" else Call(self._num_calls, "pause", {"mode": what})
        self._at_coordinator(Peer(f"client-{client}", "front", 0, os.getpid(), b"client"), call)

    def _meet_in_collective(self) -> None:
        engines = [engine for engine in self.engines if engine is not None]
        while not self.is_broken and len(engines) == len(self.engines) and all(e.worker.entered for e in engines):
            agreed = agree([engine.worker.entered.popleft() for engine in engines])
            for outcomes in self.outcomes:
                outcomes.append(agreed)


def walk(setting: Setting, seed: int, *, wave: type[Wave] = Wave, most: int = 120) -> list[str]:
    """One way through the model, with the shells beside it; the events of it. Raises AssertionError where they part."""
    rng, model, shells = random.Random(seed), WaveModel(setting), Shells(setting, wave=wave)
    world, events = model.begin(), list[str]()
    while len(events) < most and (moves := _without_votes(model, world)):
        protocol = [move for move in moves if move.is_protocol]
        move = rng.choice(protocol if protocol and rng.random() < 0.75 else moves)
        events.append(move.event)
        shells.follow(move.event, world, model)
        world = _voted(model, move.state)
        difference = shells.difference(world, model)
        assert not difference, "\n".join([difference, *events])
    return events


def _without_votes(model: WaveModel, world: World) -> list[Move]:
    return [move for move in model.moves(world) if not move.event.endswith("votes")]


def _voted(model: WaveModel, world: Any) -> World:
    """Every rank that may step has done so."""
    while votes := [move.state for move in model.moves(world) if move.event.endswith("votes")]:
        world = votes[0]
    found: World = world
    return found

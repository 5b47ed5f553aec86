"""The product's parts, each in a simulated process: what their `main` modules do with sockets, done in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from trireme.coordinator.core import Coordinator
from trireme.coordinator.shell import CoordinatorShell
from trireme.coordinator.simulation.cost_model import SimulatedExecutor, SimulatedWorker
from trireme.coordinator.simulation.loop import VirtualLoop
from trireme.coordinator.simulation.network import ClientEnd
from trireme.coordinator.simulation.timeline import Process
from trireme.engine_core import main as engine_main
from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import WorkerLost
from trireme.engine_core.loop import EngineLoop
from trireme.errors import EngineError
from trireme.serving.engines.client import EngineClient

if TYPE_CHECKING:
    from tests.sim.world import World


class TurningPoller:
    """A Poller that does not wait: it remembers what it was asked, and calls back when its process has a turn."""

    def __init__(self) -> None:
        self.wait_s = 0.0
        self._callbacks: list[tuple[Any, Callable[[], None]]] = []

    def add(self, source: Any, on_readable: Callable[[], None]) -> None:
        self._callbacks.append((source, on_readable))

    def wait(self, timeout_s: float | None) -> bool:
        self.wait_s = timeout_s if timeout_s is not None else 1.0
        return False

    def call_back(self) -> None:
        for source, callback in self._callbacks:
            if source.has_input:
                callback()


class EngineHost:
    """One life of an engine, as engine_core.main makes it."""

    core_type: type[EngineCore] = EngineCore
    loop_type: type[EngineLoop] = EngineLoop

    def __init__(self, world: World, index: int, epoch: int) -> None:
        scene = world.scene
        self.world = world
        self.index = index
        self.process = world.new_process(scene.engines[index], epoch)
        self.core = self.core_type(
            scene.limits, engine=index, epoch=epoch, depth=scene.depth, ahead=scene.ahead, policy=scene.policy
        )
        limits = scene.limits
        worker = SimulatedWorker(
            limits.num_blocks, limits.block_size, limits.vocab_size, scene.costs[index], ahead=scene.ahead
        )
        self.executor = SimulatedExecutor(world.timeline, self.process, worker, scene.depth)
        self.executor.die = WorkerLost
        self.poller = TurningPoller()
        self.server = world.network.bind(self.process, "engine", self.core.facts())
        coordinator = world.network.connect(self.process, "engine", "coordinator") if scene.has_coordinator else None
        self.loop = self.loop_type(
            self.core,
            self.executor,
            self.server,
            self.poller,  # type: ignore[arg-type]
            step_timeout=scene.step_timeout,
            on_load=coordinator.send if coordinator is not None else None,
            tells_blocks=scene.routes_by_prefix,
            clock=self.process.clock,
        )
        if coordinator is not None:
            self.poller.add(coordinator, lambda: engine_main._on_coordinator(coordinator, self.loop))  # type: ignore[arg-type]
        self.book = world.books.open_engine(self)
        self.process.turn = self.turn
        self.process.wake()

    def turn(self) -> float:
        """As `_serve` of engine_core.main: an error ends the engine after its last words."""
        try:
            self.poller.call_back()
            self.book.check_gone()
            self.loop.turn()
        except EngineError as error:
            self.world.books.check_death(self, error)
            self.loop.last_words(error.message)
            self.world.end_engine(self, f"ended: {error.message}")
            return 0.0
        if self.loop.is_over:
            self.world.end_engine(self, "left after a drain")
        return self.poller.wait_s


class CoordinatorHost:
    """One life of the coordinator, as coordinator.main makes it."""

    core_type: type[Coordinator] = Coordinator

    def __init__(self, world: World, epoch: int) -> None:
        self.process = world.new_process("coordinator", epoch)
        self.core = self.core_type(
            len(world.scene.engines),
            world.scene.balance,
            random.Random(world.rng.random()),
            epoch=epoch,
            block_size=world.scene.limits.block_size,
            steals_for=world.scene.steals_for,
        )
        self.server = world.network.bind(self.process, "coordinator")
        self.shell = CoordinatorShell(self.core, self.server, clock=self.process.clock)
        self.process.turn = self.turn
        self.process.wake()

    def turn(self) -> float:
        if self.server.has_input:
            self.shell.on_messages()
        return self.shell.turn()

    @property
    def num_tickets(self) -> int:
        """Given, and not yet settled."""
        return sum(self.core.ledger.outstanding(engine.index).num_tickets for engine in self.core.members)


class FrontHost:
    """One life of a front end: its event loop, its client, its requests."""

    client_type: type[EngineClient] = EngineClient

    def __init__(self, world: World, name: str, epoch: int) -> None:
        scene = world.scene
        self.world = world
        self.process: Process = world.new_process(name, epoch)
        self.loop = VirtualLoop(self.process.clock)
        self.links: list[ClientEnd] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

        def link_to(target: str) -> Callable[[Callable[[Any], None]], ClientEnd]:
            def connect(on_message: Callable[[Any], None]) -> ClientEnd:
                link = world.network.connect(self.process, "front", target)
                link.on_message = on_message
                self.links.append(link)
                return link

            return connect

        self.client = self.client_type(
            [link_to(engine) for engine in scene.engines],
            link_to("coordinator") if scene.has_coordinator else None,
            rng=random.Random(world.rng.random()),
            tells_prefix=scene.routes_by_prefix,
            clock=self.process.clock,
        )
        self.loop.call_soon(self.client.start)
        self.process.turn = self.turn
        self.process.wake()

    def turn(self) -> float:
        for link in self.links:
            if link.has_input:
                self.loop.call_soon(link.dispatch)
        wait_s = self.loop.turn()
        self.world.books.check_front(self)
        return wait_s

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A new task, at the process's next turn."""
        self.loop.call_soon(self._begin, work, name)
        self.process.wake()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.tasks[name] = self.loop.create_task(work, name=name)
        task.add_done_callback(self.world.books.note_task)

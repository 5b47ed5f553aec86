"""Workers of an engine as processes of their own: one per rank of TP x PP, over a socket that only they connect to, and rings in
shared memory for what every step sends.

Used by the engine loop. Starts the workers by module name, sends every plan to all of them, and turns the death of any worker
into the one error that explains it. Must never outlive its workers, nor they the engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trireme.config import EngineConfig
from trireme.engine_core.executor.base import OnReply, WorkerLost, WorkerPlace, depth_of
from trireme.errors import ConfigError, ModelError, TriremeError
from trireme.machine.starvation import Starvation, children_of
from trireme.model.files import files_of
from trireme.model.reader import read_arch
from trireme.phases import slowest
from trireme.topology.arena import Arena, create_arena
from trireme.topology.mesh import Mesh
from trireme.transport.memory.ring import Ring, RingReceiver, RingSender, is_supported
from trireme.transport.process.boot import Child, reap, spawn
from trireme.transport.sockets.names import Disconnected, Peer, Poller, Server
from trireme.transport.wire.messages import (
    Call,
    CallReply,
    Failed,
    Hello,
    LoadProgress,
    NextToken,
    RingPlace,
    SetupKV,
    StepPlan,
    StepResult,
    WorkerFault,
    WorkerInit,
    WorkerLoaded,
    WorkerReady,
    WorkerToCore,
)
from trireme.transport.wire.plan_delta import shortened

log = logging.getLogger("trireme.engine")

WORKER_MODULE = "trireme.workers.main"
LAST_WORDS_S = 0.4  # after the first death: other workers may report the cause
REAP_S = 1.0  # for killed workers to exit: one stuck in the kernel must not keep the engine
SECONDARY = ("CollectiveError", "the engine core")  # reported by workers that only saw another one die


class WorkerRings:
    """Shared memory between a core and its workers: `orders` to all of them, and `results` of the one that reports."""

    def __init__(self, num_workers: int) -> None:
        """Raises OSError where the system gives no memory or descriptors."""
        with contextlib.ExitStack() as undo:
            self._orders_ring = Ring(num_workers)
            undo.callback(self._orders_ring.close)
            self._results_ring = Ring(1)
            undo.callback(self._results_ring.close)
            self.orders: RingSender = self._orders_ring.sender()
            undo.callback(self.orders.close)
            self.results: RingReceiver = self._results_ring.receiver(0, StepResult)
            undo.callback(self.results.close)
            self._undo = undo.pop_all()

    @classmethod
    def make(cls, num_workers: int) -> WorkerRings | None:
        """None where sockets must do."""
        if not is_supported():
            return None
        try:
            return cls(num_workers)
        except OSError as error:
            log.warning("steps are sent by socket: no shared memory for %d workers: %s", num_workers, error)
            return None

    def orders_of(self, worker: int) -> RingPlace:
        return self._orders_ring.place(worker)

    def results_place(self) -> RingPlace:
        return self._results_ring.place(0, writes=True)

    def close(self) -> None:
        self._undo.close()


class ProcsExecutor:
    """TP x PP worker processes."""

    def __init__(self, config: EngineConfig, place: WorkerPlace, poller: Poller) -> None:
        if place.boot is None:
            raise ConfigError("worker processes need an engine process", hint="--executor inproc")
        self._config = config
        self._boot = place.boot
        self._dp_rank = place.dp_rank
        parallel = config.parallel
        self.depth = depth_of(config)
        self._mesh = Mesh(parallel.dp, parallel.pp, parallel.tp, place.dp_rank)
        self._poller = poller
        self._starvation = Starvation()
        self._arena: Arena | None = None
        self._rings: WorkerRings | None = None
        self._server: Server | None = None
        self._children: list[Child] = []
        self._peers: dict[int, Peer] = {}
        self._loaded: dict[int, WorkerLoaded] = {}
        self._ready: dict[int, WorkerReady] = {}
        self._results: deque[StepResult] = deque()
        self._calls: dict[int, tuple[OnReply, dict[int, CallReply]]] = {}
        self._next_call = 0
        self._plan: StepPlan | None = None  # the last one sent
        self._progress: Callable[[LoadProgress], None] = lambda message: None
        self._deaths: list[Failed] = []  # reports of dead or dying workers, in order of arrival

    # ------------------------------------------------------------ the interface

    def load(self, progress: Callable[[LoadProgress], None]) -> list[WorkerLoaded]:
        """Starts the workers and waits for their weights. Raises the root cause when one fails or dies."""
        self._progress = progress
        self._arena = self._make_arena()
        self._rings = WorkerRings.make(self._mesh.num_workers)
        self._server = Server.open(self._boot, f"{self._boot.name}.workers", WorkerToCore, silence_s=None)
        self._poller.add(self._server, self._on_messages)
        if self._rings is not None:
            self._poller.add(self._rings.results, self._on_results)
        for worker in range(self._mesh.num_workers):
            self._start(worker)
        self._wait(lambda: len(self._loaded) == self._mesh.num_workers)
        return [self._loaded[worker] for worker in range(self._mesh.num_workers)]

    def setup_kv(self, num_blocks: int) -> Mapping[str, float]:
        self._broadcast(SetupKV(num_blocks))
        self._wait(lambda: len(self._ready) == self._mesh.num_workers)
        return slowest([ready.phases for ready in self._ready.values()])

    def submit(self, plan: StepPlan) -> None:
        before, self._plan = self._plan, plan
        self._broadcast(shortened(before, plan) or plan)

    def take_results(self) -> list[StepResult]:
        if self._deaths:
            self._raise_root_cause()
        results = list(self._results)
        self._results.clear()
        return results

    def call(self, method: str, args: dict[str, Any], on_reply: OnReply) -> None:
        self._next_call += 1
        self._calls[self._next_call] = (on_reply, {})
        self._broadcast(Call(self._next_call, method, args))

    def halted(self) -> str:
        return next((f"{child.name} is stopped" for child in self._children if child.is_halted()), "")

    def starved_s(self) -> float:
        pids = [child.pid for child in self._children]
        if self._config.in_lockstep:  # a step is as late as on the slowest engine
            for engine in children_of(os.getppid()):
                pids += children_of(engine)
        return self._starvation.look(time.monotonic(), dict.fromkeys(pids))

    def close(self) -> None:
        """Stops the workers, waiting up to REAP_S seconds for them, and closes the socket, the arena and the rings."""
        for child in self._children:
            self._poller.remove(child)
        reap(self._children, REAP_S)
        self._children.clear()
        if self._server is not None:
            self._poller.remove(self._server)
            self._server.close(0.0)
            self._server = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        if self._rings is not None:
            self._poller.remove(self._rings.results)
            self._rings.close()
            self._rings = None

    # ------------------------------------------------------------ start

    def _make_arena(self) -> Arena | None:
        """Shared memory for collectives; fake workers and single workers have none."""
        if self._mesh.num_workers == 1 or self._config.parallel.worker == "fake":
            return None
        arch = read_arch(files_of(self._config.model))
        return create_arena(self._mesh, self._config.scheduler.num_tokens, arch.hidden, arch.vocab_size)

    def _start(self, worker: int) -> None:
        name = f"{self._boot.name}.worker-{worker}"
        boot = msgspec.structs.replace(self._boot, role="worker", name=name, index=worker, listen_fd=-1)
        child = spawn(WORKER_MODULE, boot)
        self._children.append(child)
        self._poller.add(child, lambda: self._on_child(child))

    def _wait(self, true: Callable[[], bool]) -> None:
        while not true():
            self._poller.wait(1.0)
            if self._deaths:
                self._raise_root_cause()

    # ------------------------------------------------------------ messages from workers

    def _on_messages(self) -> None:
        assert self._server is not None
        for peer, message in self._server.receive():
            worker = self._worker_of(peer.name)
            if worker is None:
                self._server.drop(peer, f"{peer.name} is no worker of {self._boot.name}")
                continue
            self._on_message(worker, peer, message)

    def _on_message(self, worker: int, peer: Peer, message: Any) -> None:
        match message:
            case StepResult() if self._rings is not None:
                self._rings.results.add(message)
                self._on_results()
            case StepResult():
                self._results.append(message)
            case Hello():
                self._on_hello(worker, peer)
            case LoadProgress():
                self._progress(message)
            case WorkerLoaded():
                self._loaded[worker] = message
            case WorkerReady():
                self._ready[worker] = message
            case CallReply():
                self._on_reply(worker, message)
            case WorkerFault():
                fault = Failed(peer.name, message.error, message.hint, message.traceback, message.exit_code)
                self._deaths.append(fault)
            case Disconnected():
                self._deaths.append(Failed(peer.name, f"{peer.name} is gone: {message.reason}"))

    def _on_results(self) -> None:
        assert self._rings is not None
        self._results.extend(self._rings.results.receive())

    def _on_hello(self, worker: int, peer: Peer) -> None:
        self._peers[worker] = peer
        assert self._server is not None
        arena = self._arena.path if self._arena is not None else ""
        orders, results = None, None
        if self._rings is not None:
            orders = self._rings.orders_of(worker)
            results = self._rings.results_place() if self._mesh.at_worker(worker).reports_result else None
        init = WorkerInit(self._boot.config, self._dp_rank, worker, arena, self._boot.peers, orders, results)
        self._server.send(peer, init)

    def _on_reply(self, worker: int, reply: CallReply) -> None:
        call = self._calls.get(reply.call_id)
        if call is None:
            return
        on_reply, replies = call
        replies[worker] = reply
        if len(replies) == self._mesh.num_workers:
            del self._calls[reply.call_id]
            errors = [reply.error for reply in replies.values() if not reply.ok]
            on_reply([] if errors else [replies[rank].result for rank in sorted(replies)], errors[0] if errors else "")

    def _on_child(self, child: Child) -> None:
        self._deaths += [report for report in child.receive() if isinstance(report, Failed)]
        if child.is_dead:
            self._poller.remove(child)
            if not self._deaths:
                self._deaths.append(Failed(child.name, f"{child.name} ended although nobody asked it to"))

    # ------------------------------------------------------------ messages to workers

    def _broadcast(self, message: SetupKV | StepPlan | NextToken | Call) -> None:
        assert self._server is not None
        if self._rings is not None and self._rings.orders.send(message):
            return
        self._server.broadcast(message, role="worker")

    def _worker_of(self, name: str) -> int | None:
        for worker, child in enumerate(self._children):
            if child.name == name:
                return worker
        return None

    def _raise_root_cause(self) -> None:
        """Raises the first error that is not a consequence of another worker's death, after waiting for late reports."""
        if self._arena is not None:
            self._arena.abort()
        until = time.monotonic() + LAST_WORDS_S
        while time.monotonic() < until and all(_rank(report) > 0 for report in self._deaths):
            self._poller.wait(0.05)
        raise _error_of(min(self._deaths, key=_rank))  # min keeps the first among equals


def _rank(report: Failed) -> int:
    """0: a worker's own exception; 1: killed from outside; 2: gone, cause unknown; 3: saw another one die."""
    if any(word in report.traceback for word in SECONDARY):
        return 3
    if report.traceback:
        return 0
    return 2 if " is gone: " in report.error else 1


def _error_of(report: Failed) -> TriremeError:
    """The report as an exception of the class that its exit code stands for, so that the supervisor exits alike."""
    text = report.error if report.source in report.error else f"{report.source}: {report.error}"
    for kind in (ConfigError, ModelError):
        if report.exit_code == kind.exit_code:
            return kind(text, hint=report.hint)
    return WorkerLost(text, hint=report.hint, traceback=report.traceback)

"""Process shell of one worker, real or fake: executes orders from its engine core over a socket, one at a time, in order.

Started by the engine's multi-process executor as `spawn("workers.main", boot)`; boot.name is `engine-<dp>.worker-<n>` and
boot.index is n. Sends LoadProgress, WorkerLoaded, WorkerReady, StepResult, CallReply; on any exception a WorkerFault, and
ends. It decides nothing, and it does not outlive its engine core.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from trireme.config import EngineConfig
from trireme.errors import EngineError, TriremeError
from trireme.phases import Phases
from trireme.transport.memory.ring import RingReceiver, RingSender
from trireme.transport.process.boot import BootChannel, settle_memory
from trireme.transport.sockets.names import Connection, Disconnected, Poller, Waker
from trireme.transport.step_futures import StepFuture, Waiter
from trireme.transport.wire.messages import (
    Boot,
    Call,
    CallReply,
    LoadProgress,
    NextToken,
    SetupKV,
    StepPlan,
    StepResult,
    Welcome,
    Wire,
    WorkerFault,
    WorkerInit,
    WorkerLoaded,
    WorkerReady,
)
from trireme.transport.wire.plan_delta import next_plan

ORDERS = WorkerInit | SetupKV | StepPlan | NextToken | Call
MODULES = {"torch": "trireme.workers.cpu.worker", "cuda": "trireme.workers.cuda.worker", "fake": "trireme.workers.fake"}


class AnyWorker(Protocol):
    """What workers.cpu.worker.CpuWorker and workers.fake.FakeWorker have in common."""

    def load(self) -> WorkerLoaded: ...

    def setup_kv(self, num_blocks: int) -> Mapping[str, float]: ...

    def execute(self, plan: StepPlan) -> StepResult | None: ...

    def call(self, method: str, args: dict[str, Any]) -> Any: ...

    def close(self) -> None: ...


def make_worker(init: WorkerInit, progress: Callable[[str, int, int], None]) -> AnyWorker:
    """The worker kind named by config.parallel. The fake one imports no torch."""
    kind = msgspec.msgpack.decode(init.config, type=EngineConfig).parallel.worker_kind
    if MODULES[kind] not in sys.modules:
        progress("libraries", 0, 1)
        importlib.import_module(MODULES[kind])
        progress("libraries", 1, 1)
    worker: AnyWorker = sys.modules[MODULES[kind]].Worker(init, progress)
    return worker


def socket_name(boot: Boot) -> str:
    """`engine-0.worker-1` connects to `engine-0.workers`."""
    return boot.name.partition(".")[0] + ".workers"


class WorkerShell:
    """Passes one order at a time from the engine core to the worker, and its answer back.

    A worker with `launch` gets the next plan while one runs; `waker` is set when a launched one has ended. `on_ring` is called with
    the ring of orders when the core has one.
    """

    def __init__(
        self,
        boot: Boot,
        connection: Connection,
        phases: Phases | None = None,
        on_ring: Callable[[RingReceiver], None] = lambda ring: None,
    ) -> None:
        self.waker = Waker()
        self._phases = phases or Phases()
        self._index = boot.index
        self._connection = connection
        self._on_ring = on_ring
        self._orders: RingReceiver | None = None
        self._results_ring: RingSender | None = None
        self._worker: AnyWorker | None = None
        self._launch: Callable[[StepPlan], StepFuture] | None = None
        self._results: deque[StepResult] = deque()
        self._waiter = Waiter(self.waker.set, self._results)
        self._plan: StepPlan | None = None  # the last one
        self.is_over = False

    def on_readable(self) -> None:
        """Handles arrived messages; ends when the engine core is gone."""
        for message in self._connection.receive():
            if isinstance(message, Disconnected):
                self.is_over = True
            elif self._orders is not None and not isinstance(message, Welcome):
                self._orders.add(message)
            elif not self.is_over:
                self._obey(message)
        for message in self._orders.receive() if self._orders is not None else ():
            if self.is_over:
                break
            self._obey(message)

    def on_results(self) -> None:
        """Sends the results of launched steps. Raises what one of them raised."""
        while self._results:
            self._send_result(self._results.popleft())
        if self._waiter.error is not None:
            raise self._waiter.error

    def _obey(self, message: Any) -> None:
        match message:
            case StepPlan():
                self._execute(message)
            case NextToken():
                if self._plan is None:
                    raise EngineError("a plan says 'as before', but there was none before")
                self._execute(next_plan(self._plan, message))
            case Call():
                self._send(self._answer(message))
            case WorkerInit():
                self._open_rings(message)
                self._phases.end("links")
                self._worker = make_worker(message, self._report)
                self._phases.end("libraries")
                self._launch = getattr(self._worker, "launch", None)
                self._waiter.start()
                loaded = self._worker.load()
                self._phases.include(loaded.phases, "load")
                self._send(msgspec.structs.replace(loaded, phases=self._phases.seconds))
            case SetupKV():
                phases = self._need_worker().setup_kv(message.num_blocks)
                settle_memory()
                self._send(WorkerReady(self._index, dict(phases)))
            case Welcome():
                pass

    def _execute(self, plan: StepPlan) -> None:
        self._plan = plan
        if self._launch is not None:
            self._waiter.put(self._launch(plan))
            return
        result = self._need_worker().execute(plan)
        if result is not None:
            self._send_result(result)

    def _open_rings(self, init: WorkerInit) -> None:
        if init.orders is not None:
            self._orders = RingReceiver(init.orders, SetupKV | StepPlan | NextToken | Call)
            self._on_ring(self._orders)
        if init.results is not None:
            self._results_ring = RingSender(init.results)

    def _send_result(self, result: StepResult) -> None:
        if self._results_ring is None or not self._results_ring.send(result):
            self._send(result)

    def _answer(self, call: Call) -> CallReply:
        """Calls the worker; a method that is refused or fails on purpose returns an error instead of ending this worker."""
        try:
            return CallReply(call.call_id, True, self._need_worker().call(call.method, call.args))
        except TriremeError as error:
            return CallReply(call.call_id, False, None, error.message)

    def _report(self, phase: str, done: int, total: int) -> None:
        self._send(LoadProgress(self._index, phase, done, total))

    def _send(self, message: Wire) -> None:
        if not self._connection.send(message):
            self.is_over = True  # the engine core is gone, or too far behind to catch up

    def _need_worker(self) -> AnyWorker:
        if self._worker is None:
            raise EngineError("an order arrived before WorkerInit")
        return self._worker

    def close(self) -> None:
        self._waiter.close()
        if self._worker is not None:
            self._worker.close()
        for ring in (self._orders, self._results_ring):
            if ring is not None:
                ring.close()


def main(channel: BootChannel) -> None:
    """Runs one worker until its engine core goes away or asks it to drain."""
    boot = channel.boot
    connection = Connection.open(boot, socket_name(boot), ORDERS, silence_s=None)
    poller = Poller()
    shell = WorkerShell(boot, connection, channel.phases, lambda ring: poller.add(ring, shell.on_readable))
    poller.add(connection, shell.on_readable)
    poller.add(shell.waker, shell.on_results)
    poller.add(channel, lambda: setattr(shell, "is_over", shell.is_over or bool(channel.receive())))
    try:
        connection.wait_up(timeout_s=60.0)
        channel.ready()
        while not shell.is_over:
            shell.on_readable()
            poller.wait(None)
    except Exception as error:  # process main: the engine core must learn the cause before this process ends
        connection.send(_fault(boot.index, error))
        connection.close()
        raise
    shell.close()
    connection.close()


def _fault(index: int, error: Exception) -> WorkerFault:
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, TriremeError):
        return WorkerFault(index, error.message, error.hint, trace, error.exit_code)
    return WorkerFault(index, f"{type(error).__name__}: {error}", "", trace)

"""The one worker of an engine, in a thread of the engine's process: no serialization, no sockets, same interface.

Used by the engine loop. Only its thread touches the worker; orders and answers pass through two queues. When another
step is queued, the loop is woken only after that step has reached the kernels: otherwise both threads would contend for the
interpreter and the worker would get it last.
"""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from trireme.config import EngineConfig
from trireme.engine_core.executor.base import MODULES, OnReply, WorkerPlace, depth_of
from trireme.errors import ConfigError, TriremeError
from trireme.machine.starvation import Starvation
from trireme.phases import Phases
from trireme.transport.sockets.poller import Poller, Waker
from trireme.transport.step_futures import StepFuture, Waiter
from trireme.transport.wire.messages import LoadProgress, StepPlan, StepResult, WorkerInit, WorkerLoaded


class InprocExecutor:
    """One worker in a thread. A worker with `launch` is given the next step while one runs; a second thread waits for results."""

    def __init__(self, config: EngineConfig, place: WorkerPlace, poller: Poller) -> None:
        if config.parallel.tp * config.parallel.pp != 1:
            raise ConfigError("the in-process executor runs one worker", hint="--executor procs")
        self.depth = depth_of(config)
        peers = place.boot.peers if place.boot is not None else ""
        self._init = WorkerInit(msgspec.msgpack.encode(config), place.dp_rank, 0, peers=peers)
        self._module = MODULES[config.parallel.worker_kind]
        self._poller = poller
        self._waker = Waker()
        self._poller.add(self._waker, lambda: None)
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._results: deque[StepResult] = deque()
        self._replies: deque[tuple[OnReply, list[Any], str]] = deque()
        self._progress: deque[LoadProgress] = deque()
        self._done: deque[Any] = deque()  # answers to load and setup_kv
        self._error: BaseException | None = None
        self._worker: Any = None
        self._launch: Callable[[StepPlan], StepFuture] | None = None
        self._is_set_up = False
        self._starvation = Starvation()
        self._on_progress: Callable[[LoadProgress], None] = lambda message: None
        self._thread = threading.Thread(target=self._work, name="worker", daemon=True)
        self._waiter = Waiter(self._waker.set, self._results)

    def load(self, progress: Callable[[LoadProgress], None]) -> list[WorkerLoaded]:
        self._on_progress = progress
        self._thread.start()
        self._orders.put(self._do_load)
        loaded: WorkerLoaded = self._wait()
        return [loaded]

    def setup_kv(self, num_blocks: int) -> Mapping[str, float]:
        self._orders.put(lambda: self._done.append(self._worker.setup_kv(num_blocks)))
        phases: Mapping[str, float] = self._wait()
        self._is_set_up = True
        return phases

    def submit(self, plan: StepPlan) -> None:
        if self._launch is None:
            self._orders.put(lambda: self._results.append(self._worker.execute(plan)))
        else:
            launch = self._launch
            self._orders.put(lambda: self._waiter.put(launch(plan)))

    def take_results(self) -> list[StepResult]:
        """Runs due replies of `call`, then returns the results since the last call. Raises the worker's error after them."""
        while self._replies:
            on_reply, results, error = self._replies.popleft()
            on_reply(results, error)
        results = []
        while self._results:
            results.append(self._results.popleft())
        failed = self._error or self._waiter.error
        if failed is not None and not results:
            raise failed
        return results

    def call(self, method: str, args: dict[str, Any], on_reply: OnReply) -> None:
        self._orders.put(lambda: self._do_call(method, args, on_reply))

    def halted(self) -> str:
        """Always "": a thread stops with its process."""
        return ""

    def starved_s(self) -> float:
        return self._starvation.look(time.monotonic(), [os.getpid()])

    def close(self) -> None:
        """Lets the running step finish if it is quick; a running load is left to the end of the process."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join(timeout=5.0 if self._is_set_up else 0.0)
        self._poller.remove(self._waker)
        if not self._thread.is_alive():
            self._waker.close()

    def _wait(self) -> Any:
        while not self._done:
            if self._error is not None:
                raise self._error
            self._poller.wait(1.0)
            while self._progress:
                self._on_progress(self._progress.popleft())
        return self._done.popleft()

    # ------------------------------------------------------------ the worker's thread

    def _work(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                order()
            except BaseException as error:  # thread main: the engine loop re-raises it as the root cause
                self._error = error
                self._waker.set()
                return
            if self._orders.empty():
                self._waker.set()
        self._waiter.close()
        if self._worker is not None:
            self._worker.close()

    def _do_load(self) -> None:
        phases = Phases()
        if self._module not in sys.modules:
            self._report("libraries", 0, 1)
            importlib.import_module(self._module)
            self._report("libraries", 1, 1)
        phases.end("libraries")
        self._worker = sys.modules[self._module].Worker(self._init, self._report)
        self._worker.before_forward = self._waker.set
        self._launch = getattr(self._worker, "launch", None)
        if self._launch is not None:
            self._waiter.start()
        loaded: WorkerLoaded = self._worker.load()
        phases.include(loaded.phases, "load")
        self._done.append(msgspec.structs.replace(loaded, phases=phases.seconds))

    def _report(self, phase: str, done: int, total: int) -> None:
        self._progress.append(LoadProgress(0, phase, done, total))
        self._waker.set()

    def _do_call(self, method: str, args: dict[str, Any], on_reply: OnReply) -> None:
        try:
            self._replies.append((on_reply, [self._worker.call(method, args)], ""))
        except TriremeError as error:
            self._replies.append((on_reply, [], error.message))

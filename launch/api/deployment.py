"""Where the engines behind LLM and AsyncLLM run: in a thread of this process, or in processes under a Supervisor.

A single CPU worker runs here, with nothing but queues between it and the caller; several workers or engines, and a GPU, which
must never wait for the caller's Python, get the process tree of `trireme serve` without its frontends. Both give the same
EngineClient.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

from trireme.config import EngineConfig
from trireme.engine_core.executor.base import WorkerPlace
from trireme.engine_core.executor.factory import make_executor
from trireme.engine_core.loop import EngineLoop
from trireme.engine_core.start import start_core
from trireme.errors import ConfigError, EngineError, ModelError, TriremeError
from trireme.launch.api.startup import Life, lives_of
from trireme.launch.processes.events import AllReady, Died, Event
from trireme.launch.processes.supervisor import Supervisor
from trireme.phases import Phases
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.connect import client_over_sockets
from trireme.transport.sockets.local import LocalServer
from trireme.transport.sockets.poller import Poller, Waker
from trireme.transport.wire.messages import Failed, LoadProgress, Progress

log = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[Progress], None]


class Deployment(Protocol):
    """Engines that are starting, running or stopped. `start` blocks until they can answer and raises the error if they cannot."""

    lives: dict[str, Life]  # start of each engine, once they have started

    def start(self) -> None: ...

    def client(self) -> EngineClient:
        """A client that is not started yet; start it in the loop that will use it."""
        ...

    def close(self) -> None:
        """Stops the engines and waits for them. May be called twice."""
        ...


def make_deployment(config: EngineConfig, on_progress: OnProgress) -> Deployment:
    """The deployment for a resolved configuration."""
    parallel = config.parallel
    if parallel.dp == 1 and parallel.executor == "inproc" and parallel.worker_kind != "cuda":
        return InProcess(config, on_progress)
    return UnderSupervisor(config, on_progress)


class InProcess:
    """One engine with its one worker in threads of this process; a LocalServer in place of sockets."""

    def __init__(self, config: EngineConfig, on_progress: OnProgress) -> None:
        self._config = config
        self._on_progress = on_progress
        self.lives: dict[str, Life] = {}
        self._server = LocalServer("engine-0")
        self._waker = Waker()
        self._stop = False
        self._settled = threading.Event()  # ready, or failed
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def client(self) -> EngineClient:
        """A client without reconnection: a dead engine is not restarted here, so no request waits for it."""
        connect = [lambda on_message: self._server.connect("front-0", on_message)]
        return EngineClient(connect, migration_limit=0, engine_wait_s=0.0)

    def close(self) -> None:
        self._stop = True
        if self._thread.is_alive():
            self._waker.set()
            self._thread.join()

    def _run(self) -> None:
        """The engine's thread. An error before readiness is raised by `start`, a later one by running requests."""
        config, phases = self._config, Phases()
        poller = Poller()
        poller.add(self._waker, lambda: None)
        executor = make_executor(config, WorkerPlace(0), poller)
        reason = "the engine was closed"
        try:
            started = start_core(config, executor, self._forward, phases=phases)
            self._server.set_facts(started.core.facts())
            loop = EngineLoop(
                started.core,
                executor,
                self._server,
                poller,
                step_timeout=config.launch.step_timeout,
                has_captures=config.parallel.worker_kind == "cuda",
            )
            phases.end("links")
            self.lives["engine-0"] = Life(phases.began, phases.began, phases.seconds)
            self._settled.set()
            while not self._stop:
                loop.turn()
        except Exception as error:  # the end of a thread: whoever waits for the engine must get the error
            self._error = error
            reason = str(error) or type(error).__name__
            if self._settled.is_set():
                log.error("the engine failed", exc_info=error)
        finally:
            executor.close()
            self._server.close(reason=reason)
            poller.remove(self._waker)
            self._waker.close()
            self._settled.set()

    def _forward(self, report: LoadProgress) -> None:
        self._on_progress(Progress("engine-0", report.phase, report.done, report.total))


class UnderSupervisor:
    """Engines (and a coordinator) as processes, monitored and restarted by a Supervisor in a thread of its own."""

    def __init__(self, config: EngineConfig, on_progress: OnProgress, *, num_fronts: int = 0) -> None:
        self._config = config
        self._on_progress = on_progress
        self.lives: dict[str, Life] = {}
        self._supervisor = Supervisor(config, self._on_event, num_fronts=num_fronts)
        self._settled = threading.Event()  # ready, or failed
        self._stop = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._settled.wait()
        if self._error is not None:
            self.close()
            raise self._error

    @property
    def address(self) -> tuple[str, int] | None:
        """(host, port) of the frontends, if there are any."""
        return self._supervisor.address

    def client(self) -> EngineClient:
        return client_over_sockets(self._supervisor.boot_for("front", "front-llm"), self._config)

    def close(self) -> None:
        self._stop = True
        self._supervisor.request_stop("close")
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        supervisor = self._supervisor
        try:
            supervisor.start()
            while not supervisor.is_finished and not self._stop:
                supervisor.step()
                if supervisor.is_ready:
                    self._settled.set()
            if supervisor.failed is not None:
                self._error = error_of(supervisor.failed)
        except TriremeError as error:
            self._error = error
        finally:
            supervisor.close()
            self._settled.set()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Progress):
            self._on_progress(event)
        elif isinstance(event, AllReady):
            self.lives = lives_of(event.parts, event.born_at)
        elif isinstance(event, Died) and event.restart_s is None:
            self._error = EngineError(f"{event.name} keeps dying: {event.error}")


def error_of(failed: Failed) -> TriremeError:
    """The exception for a child's failure that callers of the Python API get."""
    kinds: dict[int, type[TriremeError]] = {kind.exit_code: kind for kind in (ConfigError, ModelError)}
    return kinds.get(failed.exit_code, EngineError)(f"{failed.source}: {failed.error}", hint=failed.hint)

"""Where the engines behind LLM and AsyncLLM live: in a thread of this process, or in processes under a Supervisor.

One worker runs here, with nothing between it and the caller but queues; several workers or engines get the process tree of
`trireme serve` without its front ends. Both give the same EngineClient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeAlias

from launch.supervise import Died, Event, Supervisor
from serving.client import EngineClient
from serving.connect import client_over_sockets
from transport.messages import Failed, Progress
from trireme.config import EngineConfig
from trireme.errors import ConfigError, EngineError, ModelError, TriremeError

OnProgress: TypeAlias = Callable[[Progress], None]


class Deployment(Protocol):
    """Engines that are being started, run or stopped. `start` blocks until they can answer and raises why they cannot."""

    def start(self) -> None: ...

    def client(self) -> EngineClient:
        """A client that is not started yet; start it in the loop that will use it."""
        ...

    def close(self) -> None:
        """Ends the engines and waits for them. May be called twice."""
        ...


def make_deployment(config: EngineConfig, on_progress: OnProgress) -> Deployment:
    """The one that a resolved configuration asks for."""
    return UnderSupervisor(config, on_progress)


class UnderSupervisor:
    """Engines (and a coordinator) as processes, watched and restarted by a Supervisor that has a thread of its own."""

    def __init__(self, config: EngineConfig, on_progress: OnProgress, *, num_fronts: int = 0) -> None:
        self._config = config
        self._on_progress = on_progress
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
        """(host, port) of the front ends, if there are any."""
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
        elif isinstance(event, Died) and event.restart_s is None:
            self._error = EngineError(f"{event.name} keeps dying: {event.error}")


def error_of(failed: Failed) -> TriremeError:
    """A child's failure as the exception that a caller of the Python API gets."""
    kinds: dict[int, type[TriremeError]] = {kind.exit_code: kind for kind in (ConfigError, ModelError)}
    return kinds.get(failed.exit_code, EngineError)(f"{failed.source}: {failed.error}", hint=failed.hint)

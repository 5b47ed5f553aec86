"""What the engine loop needs from its workers, wherever they run. One implementation per place: inproc, procs.

Used from the engine's one thread. Blocks only in `load` and `setup_kv`; later calls only send or poll.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from trireme.config import EngineConfig
from trireme.errors import EngineError
from trireme.transport.wire.messages import Boot, LoadProgress, StepPlan, StepResult, WorkerLoaded

OnReply: TypeAlias = Callable[[list[Any], str], None]
"""Called once with the workers' results in rank order, or with an error text (and no results)."""

MODULES = {"torch": "trireme.workers.cpu.worker", "cuda": "trireme.workers.cuda.worker", "fake": "trireme.workers.fake"}
"""Modules of the worker kinds, imported by name: nothing here may import a worker."""


class WorkerPlace(NamedTuple):
    """Which engine the workers belong to. `boot` is the engine's own (None: the engine has no process of its own)."""

    dp_rank: int
    boot: Boot | None = None


class WorkerLost(EngineError):
    """A worker failed permanently, and the engine with it. `traceback` is the worker's own, if it left one."""

    code = "worker_lost"

    def __init__(self, message: str, *, hint: str = "", traceback: str = "") -> None:
        super().__init__(message, hint=hint)
        self.traceback = traceback


class Executor(Protocol):
    """Workers of one engine. Up to `depth` plans may be in flight (see `depth_of`).

    The executor registers its sources with the poller it was made with; after every poll the loop calls
    `take_results`. Any method may raise the workers' own error as the root cause (WorkerLost, ModelError, ...).
    """

    depth: int

    def load(self, progress: Callable[[LoadProgress], None]) -> list[WorkerLoaded]:
        """Starts the workers and waits until all have loaded their weights."""
        ...

    def setup_kv(self, num_blocks: int) -> Mapping[str, float]:
        """Allocates KV on all workers and waits for it. Returns the time of each phase on the slowest worker."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Sends a plan to every worker. At most `depth` may be unanswered."""
        ...

    def take_results(self) -> list[StepResult]:
        """Results since the last call, in step order."""
        ...

    def call(self, method: str, args: dict[str, Any], on_reply: OnReply) -> None:
        """Sends a rare request to all workers; `on_reply` runs inside a later poll or `take_results`."""
        ...

    def halted(self) -> str:
        """Which worker the system has stopped, as a sentence; "" when none is. Cheap."""
        ...

    def starved_s(self) -> float:
        """Seconds since the last call in which a worker was runnable but had no processor; 0 when that call is long ago."""
        ...

    def close(self) -> None:
        """Stops the workers. May be called in any state, and twice."""
        ...


def depth_of(config: EngineConfig) -> int:
    """One plan per pipeline stage; otherwise one running and one queued, so that workers never wait for the engine."""
    return 2 if config.runs_ahead else config.parallel.pp

"""What the engine loop asks of its workers, wherever they live. One implementation per place: inproc, procs.

Owned by the engine's one thread. Blocks only in `load` and `setup_kv`; everything later is a send or a look.
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
    """A worker failed for good and the engine with it. `traceback` is the worker's own, if it left one."""

    code = "worker_lost"

    def __init__(self, message: str, *, hint: str = "", traceback: str = "") -> None:
        super().__init__(message, hint=hint)
        self.traceback = traceback


class Executor(Protocol):
    """Workers of one engine. `depth` plans may be under way at once (see `depth_of`).

    The executor registers its sources with the poller it was made with; after every poller turn the loop calls
    `take_results`. Any method may raise the workers' own error as the root cause (WorkerLost, ModelError, ...).
    """

    depth: int

    def load(self, progress: Callable[[LoadProgress], None]) -> list[WorkerLoaded]:
        """Starts the workers and waits until all have loaded their weights."""
        ...

    def setup_kv(self, num_blocks: int) -> Mapping[str, float]:
        """Allocates KV everywhere, and waits for it. Gives the parts of the slowest worker's time."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hands a plan to every worker. At most `depth` may be unanswered."""
        ...

    def take_results(self) -> list[StepResult]:
        """Answers since the last call, in the order of their steps."""
        ...

    def call(self, method: str, args: dict[str, Any], on_reply: OnReply) -> None:
        """A rare request to all workers; `on_reply` runs inside a later poller turn or `take_results`."""
        ...

    def halted(self) -> str:
        """Which worker the system has stopped, as a sentence; "" when none is. Cheap."""
        ...

    def starved_s(self) -> float:
        """Of the seconds since the last call, those for which a worker wanted a processor and had none; 0 when that is long ago."""
        ...

    def close(self) -> None:
        """Ends the workers. May be called in any state, twice."""
        ...


def depth_of(config: EngineConfig) -> int:
    """One plan for each pipeline stage; or one that runs and one behind it, so that workers never wait for the engine."""
    return 2 if config.runs_ahead else config.parallel.pp

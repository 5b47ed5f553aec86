"""Chooses the executor of an engine by its resolved configuration."""

from __future__ import annotations

from trireme.config import EngineConfig
from trireme.engine_core.executor.base import Executor, WorkerPlace
from trireme.transport.sockets.poller import Poller


def make_executor(config: EngineConfig, place: WorkerPlace, poller: Poller) -> Executor:
    """The executor that the resolved configuration names; "auto" is in-process for one worker."""
    kind = config.parallel.executor
    num_workers = config.parallel.tp * config.parallel.pp
    if kind == "inproc" or (kind == "auto" and num_workers == 1):
        from trireme.engine_core.executor.inproc import InprocExecutor

        return InprocExecutor(config, place, poller)
    from trireme.engine_core.executor.procs import ProcsExecutor

    return ProcsExecutor(config, place, poller)

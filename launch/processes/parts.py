"""Processes of a deployment, and their prespawn before anything else is known. Standard library only.

`trireme serve` begins here (run): the parts import their modules while this process finds and reads the model.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from typing import Any, Literal, NamedTuple

from trireme.launch.processes.interrupts import StartGuard
from trireme.transport.process.prespawn import Prespawned, prespawn

MOST_PRESPAWNED = 16  # parts that are prespawned before it is known whether they fit into this machine


class Modules(NamedTuple):
    """The module of each kind of part (its `main(channel)` is run). Tests pass their own."""

    coordinator: str = "trireme.coordinator.main"
    engine: str = "trireme.engine_core.main"
    front: str = "trireme.serving.main"


class PartId(NamedTuple):
    """One part of a deployment; `number` counts the parts of one role."""

    role: Literal["coordinator", "engine", "front"]
    number: int
    name: str
    module: str


def parts_of(dp: int, num_fronts: int, modules: Modules) -> list[PartId]:
    """All parts, in start order."""
    places = [PartId("coordinator", 0, "coordinator", modules.coordinator)] if dp > 1 else []
    places += [PartId("engine", i, f"engine-{i}", modules.engine) for i in range(dp)]
    return places + [PartId("front", i, f"front-{i}", modules.front) for i in range(num_fronts)]


def run(invocation: Any) -> int:
    """`trireme serve`: prespawns its parts, then serves; returns the exit status. A signal before the supervisor handles signals
    ends the process here."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # as in transport/process/child.py
    gc.disable()  # until the parts are ready
    config, prespawned = invocation.loaded.config, dict[str, Prespawned]()
    with StartGuard() as guard:
        if invocation.options["print_config"]:
            return _serve(invocation, {}, None, guard)
        pipe = os.pipe() if sys.stderr.isatty() else None  # the console prints the parts' output above its bars
        guard.ends.append(lambda: discard(prespawned))
        try:
            for place in parts_of(config.parallel.dp, config.serving.api_servers, Modules())[:MOST_PRESPAWNED]:
                also = early_imports(config.parallel) if place.role == "engine" else ()
                output = 2 if pipe is None else pipe[1]
                with guard.held():
                    prespawned[place.name] = prespawn(place.module, place.name, also=also, output=output)
            return _serve(invocation, prespawned, pipe, guard)
        finally:
            discard(prespawned)


def discard(prespawned: dict[str, Prespawned]) -> None:
    """Ends all prespawned processes that did not become a part; all are killed before the first is waited for."""
    for child in prespawned.values():
        child.process.kill()
    while prespawned:
        prespawned.popitem()[1].discard()


def early_imports(parallel: Any) -> tuple[str, ...]:
    """Extra imports of an engine: its worker, where that is a thread of it."""
    is_alone = parallel.tp * parallel.pp == 1 and parallel.executor != "procs"
    return ("trireme.workers.cpu.worker",) if is_alone and parallel.worker_kind == "torch" else ()


def _serve(invocation: Any, prespawned: dict[str, Prespawned], pipe: tuple[int, int] | None, guard: StartGuard) -> int:
    status: int = import_module("trireme.launch.commands.serve").run(invocation, prespawned, pipe, guard)
    return status

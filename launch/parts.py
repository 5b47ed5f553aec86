"""Which processes a deployment has, and their start before anything else is known. Standard library only.

`trireme serve` begins here (run): the parts import their modules while this process finds and reads the model.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, Literal, NamedTuple

from transport.hatch import Egg, hatch


class Modules(NamedTuple):
    """Which module each kind of part runs (`main(channel)` in it). Tests pass their own."""

    coordinator: str = "coordinator.main"
    engine: str = "engine_core.main"
    front: str = "serving.main"


class Place(NamedTuple):
    """One part of a deployment; `number` counts those of one role."""

    role: Literal["coordinator", "engine", "front"]
    number: int
    name: str
    module: str


def parts_of(dp: int, num_fronts: int, modules: Modules) -> list[Place]:
    """All parts, in start order."""
    places = [Place("coordinator", 0, "coordinator", modules.coordinator)] if dp > 1 else []
    places += [Place("engine", i, f"engine-{i}", modules.engine) for i in range(dp)]
    return places + [Place("front", i, f"front-{i}", modules.front) for i in range(num_fronts)]


def run(invocation: Any) -> int:
    """`trireme serve`: hatches its parts, then serves; returns the exit status."""
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # as in transport/child.py
    config, eggs = invocation.loaded.config, dict[str, Egg]()
    try:
        if not invocation.options["print_config"]:
            for place in parts_of(config.parallel.dp, config.serving.api_servers, Modules()):
                eggs[place.name] = hatch(place.module, place.name, place.role)
        status: int = import_module("launch.serve").run(invocation, eggs)
        return status
    finally:
        for egg in eggs.values():
            egg.discard()

"""The deployments that faults are done to: two engines, two API servers, every worker a process, a tiny random model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.deployment import Deployment
from scripts.streams import Body, requests
from tests.chaos.poison import NAN_TOKEN, write_nan
from tests.chaos.resources import small_places
from tests.chaos.site import Site
from tests.models.tiny import make_tiny_llama
from trireme.launch.processes.parts import Modules

NUM_STREAMS = 64
LENGTH = 160  # tokens of a stream
BASE: dict[str, Any] = {"dp": 2, "api_servers": 2, "served_name": "tiny", "threads": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "wired": {},
    "few": {"num_blocks": 96},  # an engine's 32 rows want four times as many
    "full": {"tp": 2, "log_level": "info"},
    "nan": {},
}
WIRED = Modules(*(f"tests.chaos.wired.{part}" for part in ("coordinator", "engine", "front")))


@contextlib.contextmanager
def site_of(shape: str, directory: Path) -> Iterator[Site]:
    """A started deployment that knows its undisturbed answers. What it needs is written to `directory`."""
    model = directory / shape
    make_tiny_llama(model, max_position_embeddings=1024)
    if shape == "nan":
        write_nan(model)
    modules = WIRED if shape == "wired" else None
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(small_places(directory)) if shape == "full" else {}
        deployment = Deployment(BASE | {"model": str(model)} | SHAPES[shape], modules=modules)
        site = stack.enter_context(Site(deployment, places))
        site.learn(bodies(shape))
        yield site


def bodies(shape: str) -> list[Body]:
    found = requests("tiny", LENGTH, NUM_STREAMS)
    return [body | {"logit_bias": {str(NAN_TOKEN): -100}} for body in found] if shape == "nan" else found

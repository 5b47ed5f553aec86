"""The deployments that faults are done to: two engines, two API servers, every worker a process, a tiny random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripts.deployment import Deployment
from scripts.streams import Body, requests
from tests.chaos.site import Site
from tests.models.tiny import make_tiny_llama

NUM_STREAMS = 64
LENGTH = 160  # tokens of a stream
BASE: dict[str, Any] = {"dp": 2, "api_servers": 2, "served_name": "tiny", "threads": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


def make_site(shape: str, directory: Path) -> Site:
    """Not started yet; the model is written to `directory`."""
    model = directory / shape
    make_tiny_llama(model, max_position_embeddings=1024)
    return Site(Deployment(BASE | {"model": str(model)} | SHAPES[shape]))


def bodies(count: int = NUM_STREAMS, length: int = LENGTH) -> list[Body]:
    return requests("tiny", length, count)

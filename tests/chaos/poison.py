"""Requests that are bad for the worker: one row must end with an error of its own, and nobody else notice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

from scripts.streams import Body, ask
from tests.chaos.site import Inject, Injury, Site
from tests.models.tiny import random_weights, tiny_config

NAN_TOKEN = 300  # reading it makes every number of the row NaN
BAD_SEED = 666_666  # a row with it cannot be sampled (tests/chaos/wired/worker.py)
NUM_BAD = 3


def asking(change: Body) -> Inject:
    """A few requests of the first kind with this `change`, which must end with an error that says whose it is."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        body = site.bodies[0] | {"stop": None} | change
        injury = Injury()
        with ThreadPoolExecutor(NUM_BAD) as pool:
            asked = [pool.submit(ask, site.deployment.port, body) for _ in range(NUM_BAD)]
            yield injury
            for answer in (task.result() for task in asked):
                if answer.end not in ("error", "refused") or "sampling failed" not in answer.detail:
                    injury.breaches.append(f"a bad request was answered: {answer.end} {answer.detail}")

    return inject


def write_nan(directory: Path) -> None:
    """Makes the tiny model in `directory` give NaN wherever NAN_TOKEN was read."""
    from safetensors.torch import save_file

    config: dict[str, Any] = tiny_config(max_position_embeddings=1024)
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][NAN_TOKEN] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

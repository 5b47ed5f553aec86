"""Deployment topology: engine weights and zones, and which frontends use which engines.

Pure. Checked by trireme/resolve.py before anything starts; used by the coordinator and by frontends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trireme.config import EngineConfig
from trireme.errors import ConfigError

MAX_LABEL = 64  # characters
MAX_WEIGHT = 1000.0


class Topology(NamedTuple):
    """`weights` and `labels` (zones) by engine; an engine in neither has weight 1 and no zone. Each frontend uses `share` engines
    of its own, frontend 0 the first ones; 0: each uses all."""

    weights: Mapping[int, float] = {}
    labels: Sequence[str] = ()
    share: int = 0

    def weight(self, engine: int) -> float:
        return self.weights.get(engine, 1.0)

    def label(self, engine: int) -> str:
        return self.labels[engine] if engine < len(self.labels) else ""

    def labelled(self, label: str, engines: Sequence[int]) -> list[int]:
        """Those of `engines` in the zone `label`; none for an empty label."""
        return [engine for engine in engines if self.label(engine) == label] if label else []

    def group(self, engine: int) -> int:
        """The engine's share: engines of one share are used by the same frontends."""
        return engine // self.share if self.share else 0

    def group_of_front(self, front: str) -> int:
        """The share of engines that this frontend uses, or -1: all."""
        prefix, _, number = front.rpartition("-")
        return int(number) if self.share and prefix == "front" and number.isdecimal() else -1

    def far(self, num_engines: int) -> list[int]:
        """Engines in another zone than engine 0, where the coordinator is assumed to run."""
        return [engine for engine in range(num_engines) if self.label(engine) != self.label(0)]


def fleet_of(config: EngineConfig) -> Topology:
    """The topology from the settings. Raises ConfigError for lists of the wrong length, weights that are not positive numbers,
    and labels that are too long."""
    given = config.coordinator
    num_engines = config.parallel.dp
    _check_length("engine-weights", given.engine_weights, num_engines, "engines", "dp")
    _check_length("engine-labels", given.engine_labels, num_engines, "engines", "dp")
    _check_length("front-labels", given.front_labels, config.serving.api_servers, "HTTP processes", "api-servers")
    for flag, labels in (("engine-labels", given.engine_labels), ("front-labels", given.front_labels)):
        for label in labels:
            if len(label) > MAX_LABEL:
                raise ConfigError(f"--{flag}: {label[:20]!r}... has {len(label)} characters; the limit is {MAX_LABEL}")
    _check_sharing(config)
    weights = [_weight(word) for word in given.engine_weights]
    share = 0 if given.load_balancing == "internal" else num_engines // config.serving.api_servers
    return Topology(dict(enumerate(weights)), given.engine_labels, share)


def engines_of_front(config: EngineConfig, front: int) -> range:
    """The engines that a frontend uses."""
    if config.coordinator.load_balancing == "internal":
        return range(config.parallel.dp)
    share = config.parallel.dp // config.serving.api_servers
    return range(front * share, (front + 1) * share)


def _check_sharing(config: EngineConfig) -> None:
    mode, dp, fronts = config.coordinator.load_balancing, config.parallel.dp, config.serving.api_servers
    if mode == "external" and fronts != dp:
        raise ConfigError(
            f"--load-balancing external needs an HTTP process for each of {dp} engines; there are {fronts}",
            hint=f"--api-servers {dp}",
        )
    if mode == "hybrid" and dp % fronts:
        raise ConfigError(
            f"{dp} engines cannot be shared evenly by {fronts} HTTP processes", hint=f"--api-servers {dp}"
        )
    if mode != "internal" and config.serving.port and config.serving.port + fronts > 1 << 16:
        raise ConfigError(
            f"--port {config.serving.port} leaves no room for {fronts} ports in a row", hint="--port 8000"
        )


def front_label(config: EngineConfig, front: int) -> str:
    """The zone of a frontend, or ""."""
    labels = config.coordinator.front_labels
    return labels[front] if front < len(labels) else ""


def _check_length(flag: str, values: Sequence[str], expected: int, what: str, other: str) -> None:
    if values and len(values) != expected:
        raise ConfigError(
            f"--{flag} has {len(values)} entries, but there are {expected} {what}", hint=f"--{other} {len(values)}"
        )


def _weight(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_WEIGHT:
        raise ConfigError(
            f"--engine-weights: {word[:20]!r} is not a number above 0 and at most {MAX_WEIGHT:g}",
            hint="--engine-weights 2,1,1",
        )
    return value

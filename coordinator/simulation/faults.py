"""Fault schedule of one simulated world: drawn from a seed, as data. The world injects the faults.

Each run uses only some kinds of faults (each kind in about half of the runs), so that combinations occur that runs with all kinds
would hide.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

LONG_S = 17.0  # longer than any peer tolerates silence


class Fault(NamedTuple):
    """`targets` are process names, or (connecting, bound) pairs joined by ">". `seconds` is the duration, or the size of a jump."""

    at: float
    kind: str
    targets: tuple[str, ...]
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} {' '.join(self.targets)}" + (f" {self.seconds:.3f} s" if self.seconds else "")


ENGINE_KINDS = ("kill", "worker_dies", "worker_stuck", "freeze", "jump", "drain", "nap")
COORDINATOR_KINDS = ("kill", "freeze", "jump")
FRONT_KINDS = ("kill", "freeze", "jump")
LINK_KINDS = ("break", "clog", "partition", "swizzle", "slow")


def draw_faults(
    rng: random.Random,
    engines: Sequence[str],
    coordinator: Sequence[str],
    fronts: Sequence[str],
    *,
    horizon_s: float,
    most: int,
    only_coordinator: bool = False,
) -> list[Fault]:
    """At most `most` faults within `horizon_s`. With `only_coordinator` nothing else is touched."""
    links = [f"{client}>{server}" for client in fronts for server in engines] if not only_coordinator else []
    links += [f"{client}>{server}" for client in (*fronts, *engines) for server in coordinator]
    choices = [(kind, coordinator) for kind in COORDINATOR_KINDS if coordinator]
    if not only_coordinator:
        choices += [(kind, engines) for kind in ENGINE_KINDS] + [(kind, fronts) for kind in FRONT_KINDS]
    choices += [(kind, links) for kind in LINK_KINDS if links]
    kept = [choice for choice in choices if rng.random() < 0.5]
    if not kept:
        return []
    return sorted(_draw(rng, *rng.choice(kept), horizon_s) for _ in range(rng.randint(0, most)))


def _draw(rng: random.Random, kind: str, targets: Sequence[str], horizon_s: float) -> Fault:
    at = rng.random() * horizon_s
    if kind in ("partition", "swizzle"):
        count = rng.randint(1, len(targets)) if kind == "partition" else len(targets)
        return Fault(at, kind, tuple(rng.sample(targets, count)), _duration(rng))
    target: tuple[str, ...] = (rng.choice(targets),)
    if kind == "slow":
        target = tuple(targets)  # the whole network, within what this run's faults may touch
    if kind in ("freeze", "clog", "slow"):
        return Fault(at, kind, target, _duration(rng))
    if kind == "jump":
        return Fault(at, kind, target, rng.choice([0.05, 0.5, 3.0, 40.0]))
    if kind in ("kill", "worker_dies", "worker_stuck", "drain"):
        return Fault(at, kind, target, rng.choice([0.1, 0.3, 1.0, 2.5]))
    return Fault(at, kind, target)


def _duration(rng: random.Random) -> float:
    return LONG_S + rng.random() if rng.random() < 0.06 else rng.choice([0.03, 0.2, 1.0, 2.5]) * (0.5 + rng.random())

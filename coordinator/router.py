"""Routing policies: choose an engine by costs that count every ticket, near engines before far ones.

Pure (the random source is passed in). Used by core.py. Costs are in tokens; an engine that has not reported costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trireme.coordinator.ledger import Outstanding
from trireme.transport.wire.messages import Load

ROW_TOKENS = 64  # a sequence costs about this many tokens of prefill beyond its prompt: its share of future steps
CONTEXT_WEIGHT = 0.05  # a cached token costs attention only
KV_COMFORT = 0.8  # share of blocks in use above which new sequences may have to wait or preempt
KV_PENALTY = 4.0
WAIT_PENALTY = 0.25  # per second that the oldest sequence has waited
SPILL_FACTOR, SPILL_TOKENS = (
    2.0,
    512.0,
)  # a far engine is chosen when the near ones cost more than this multiple of its cost plus these tokens
CACHE_WORTH = (
    3.0  # per cached token: saved now, and again in the later turns of the conversation (`trireme bench balance`)
)

Cost = Callable[[int], float]


class Ask(NamedTuple):
    """One routing decision: among `engines` (never empty), at these costs. `weights` are the engines' sizes, `owners` those
    with most of the prompt cached (none if no engine has any)."""

    engines: Sequence[int]
    cost: Cost
    weights: Mapping[int, float] = {}
    owners: Sequence[int] = ()


Policy = Callable[[Ask], int]


def cost_of(load: Load | None, outstanding: Outstanding) -> float:
    """Work ahead of a new request at an engine, in tokens: reported, plus what is on its way."""
    tokens = float(outstanding.num_tokens)
    rows = outstanding.num_rows
    if load is None:
        return tokens + ROW_TOKENS * rows
    tokens += load.waiting_tokens + CONTEXT_WEIGHT * load.running_tokens
    rows += load.num_waiting + load.num_running
    kv_share = load.blocks_used / load.num_blocks if load.num_blocks else 0.0
    pressure = 1.0 + KV_PENALTY * max(0.0, kv_share - KV_COMFORT) + WAIT_PENALTY * load.oldest_wait_s
    return (tokens + ROW_TOKENS * rows) * pressure


def same_zone(engines: Sequence[int], near: Sequence[int], cost: Cost) -> Sequence[int]:
    """`near` out of `engines`, unless the cheapest of the others saves far more than the distance costs."""
    far = [engine for engine in engines if engine not in near]
    if not near or not far:
        return engines
    is_worth_it = min(map(cost, near)) > SPILL_FACTOR * min(map(cost, far)) + SPILL_TOKENS
    return engines if is_worth_it else near


class TwoChoices:
    """Power of two choices: the cheaper of two distinct engines drawn at random. Bursts spread, and routers do not herd."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, ask: Ask) -> int:
        if len(ask.engines) == 1:
            return ask.engines[0]
        first, second = self._rng.sample(ask.engines, 2)
        return second if ask.cost(second) < ask.cost(first) else first


class PrefixTwoChoices:
    """One candidate has cached most of the prompt, the other is any; the costs count what the cache saves. So a conversation stays
    on the engine that cached it, unless that engine is busier than its cache is worth."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._two = TwoChoices(rng)

    def __call__(self, ask: Ask) -> int:
        others = [engine for engine in ask.engines if engine not in ask.owners]
        if not ask.owners or not others:
            return self._two(ask)
        owner = self._two(ask._replace(engines=ask.owners))
        other = self._rng.choice(others)
        return other if ask.cost(other) < ask.cost(owner) else owner


class LeastLoaded:
    """The cheapest of all; ties are broken at random, never always towards the first."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, ask: Ask) -> int:
        costs = [ask.cost(engine) for engine in ask.engines]
        least = min(costs)
        return self._rng.choice([engine for engine, c in zip(ask.engines, costs, strict=True) if c == least])


class RoundRobin:
    """Weighted round robin, whatever the load. An engine that was away does not catch up on what it missed.

    Stride scheduling: choosing an engine advances its position by 1 / weight, and the engine furthest back is next.
    """

    def __init__(self, rng: random.Random) -> None:
        self._places: dict[int, float] = {}
        self._present: frozenset[int] = frozenset()
        self._last = -1

    def __call__(self, ask: Ask) -> int:
        places = self._places
        if self._present != (present := frozenset(ask.engines)):
            floor = min((places[engine] for engine in present & self._present), default=0.0)
            for engine in present - self._present:
                stride = 1.0 / ask.weights.get(engine, 1.0)
                places[engine] = max(places.get(engine, floor + stride), floor)
            self._present = present
        size = max(ask.engines) + 1
        turn = min(ask.engines, key=lambda engine: (places[engine], (engine - self._last - 1) % size))
        places[turn] += 1.0 / ask.weights.get(turn, 1.0)
        self._last = turn
        return turn


class AnyOne:
    """A random engine, whatever its load: the baseline of the other policies."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, ask: Ask) -> int:
        return self._rng.choice(ask.engines)


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "p2c": TwoChoices,
    "least": LeastLoaded,
    "round_robin": RoundRobin,
    "random": AnyOne,
    "prefix": PrefixTwoChoices,
    "prefix_least": LeastLoaded,  # over costs that count cached tokens
}

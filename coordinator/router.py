"""Choosing an engine: a table of policies over costs that count every ticket, near engines before far ones.

Pure (the random source is passed in). Used by core.py. Costs are in tokens; an engine nobody has heard of costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from trireme.coordinator.ledger import Outstanding
from trireme.transport.wire.messages import Load

ROW_TOKENS = 64  # a row costs about this many tokens of prefill beyond its prompt: its share of steps to come
CONTEXT_WEIGHT = 0.05  # a token that is already cached costs attention only
KV_COMFORT = 0.8  # share of blocks in use above which new rows may have to wait or preempt
KV_PENALTY = 4.0
WAIT_PENALTY = 0.25  # per second that the oldest row has waited
SPILL_FACTOR, SPILL_TOKENS = (
    2.0,
    512.0,
)  # a far engine is worth it when the near ones cost more than this much of its cost
CACHE_WORTH = (
    3.0  # of a token that need not be computed: once now, and again in the turns that follow (`trireme bench balance`)
)

Cost = Callable[[int], float]


class Ask(NamedTuple):
    """One choice to be made: among `engines` (never empty), at these costs. `weights` are the engines' sizes, `owners` those
    that have most of the prompt cached (none if nobody has any)."""

    engines: Sequence[int]
    cost: Cost
    weights: Mapping[int, float] = {}
    owners: Sequence[int] = ()


Policy = Callable[[Ask], int]


def cost_of(load: Load | None, outstanding: Outstanding) -> float:
    """Work that a new request would find at an engine, in tokens: reported, plus what is on its way."""
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
    """`near` out of `engines`, unless the cheapest of the others would save far more than going there is worth."""
    far = [engine for engine in engines if engine not in near]
    if not near or not far:
        return engines
    is_worth_it = min(map(cost, near)) > SPILL_FACTOR * min(map(cost, far)) + SPILL_TOKENS
    return engines if is_worth_it else near


class TwoChoices:
    """The cheaper of two distinct engines drawn at random: bursts spread, and many choosers do not herd."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, ask: Ask) -> int:
        if len(ask.engines) == 1:
            return ask.engines[0]
        first, second = self._rng.sample(ask.engines, 2)
        return second if ask.cost(second) < ask.cost(first) else first


class PrefixTwoChoices:
    """One candidate has cached most of the prompt, the other is any; the costs count what they save. So turns of one talk stay,
    and an owner that is busier than its cache is worth is left alone."""

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
    """The cheapest of all; ties go to a random one of them, never always to the first."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, ask: Ask) -> int:
        costs = [ask.cost(engine) for engine in ask.engines]
        least = min(costs)
        return self._rng.choice([engine for engine, c in zip(ask.engines, costs, strict=True) if c == least])


class RoundRobin:
    """Each engine in turn, by its weight, whatever its load. An engine that was away owes nobody the turns it missed.

    Stride scheduling: a turn moves an engine's place on by 1 / weight, and the one that is furthest back is next.
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
    """Any engine, whatever its load: what the other policies are compared with."""

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
    "prefix_least": LeastLoaded,  # over costs that count what is cached
}

"""Choosing an engine: power of two choices, least loaded, round robin, over costs that count every ticket.

Pure (the random source is passed in). Used by core.py. Costs are in tokens; an engine nobody has heard of costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from coordinator.ledger import Outstanding
from transport.messages import Load

ROW_TOKENS = 64  # a row costs about this many tokens of prefill beyond its prompt: its share of steps to come
CONTEXT_WEIGHT = 0.05  # a token that is already cached costs attention only
KV_COMFORT = 0.8  # share of blocks in use above which new rows may have to wait or preempt
KV_PENALTY = 4.0
WAIT_PENALTY = 0.25  # per second that the oldest row has waited

Cost = Callable[[int], float]
Policy = Callable[[Sequence[int], Cost], int]


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


class TwoChoices:
    """The cheaper of two distinct engines drawn at random: bursts spread, and many choosers do not herd."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, engines: Sequence[int], cost: Cost) -> int:
        if len(engines) == 1:
            return engines[0]
        first, second = self._rng.sample(engines, 2)
        return second if cost(second) < cost(first) else first


class LeastLoaded:
    """The cheapest of all; ties go to a random one of them, never always to the first."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, engines: Sequence[int], cost: Cost) -> int:
        costs = [cost(engine) for engine in engines]
        least = min(costs)
        return self._rng.choice([engine for engine, c in zip(engines, costs, strict=True) if c == least])


class RoundRobin:
    """Each engine in turn, whatever its load; engines that are away are passed over."""

    def __init__(self, rng: random.Random) -> None:
        self._last = -1

    def __call__(self, engines: Sequence[int], cost: Cost) -> int:
        self._last = min((e for e in engines if e > self._last), default=min(engines))
        return self._last


POLICIES: dict[str, Callable[[random.Random], Policy]] = {
    "p2c": TwoChoices,
    "least": LeastLoaded,
    "round_robin": RoundRobin,
}

"""`trireme bench balance`: how the policies spread a burst while keeping conversations on the engine that cached them.

The coordinator and the engine cores are the real ones, in virtual time (launch/simulation/balance_sim.py). No model. The cost of
a decision is measured on a real coordinator process (launch/bench/route.py).
"""

from __future__ import annotations

from collections import Counter

from trireme.errors import ConfigError
from trireme.launch.bench import route as bench_route
from trireme.launch.bench.samples import RunSummary, publish
from trireme.launch.options import Invocation
from trireme.launch.simulation.balance_sim import ALONE, Asked, World, burst, conversation
from trireme.metrics import percentile

POLICIES = ("random", "round_robin", "p2c", "least", "prefix", "prefix_least", ALONE)
NUM_ENGINES = 4
NUM_ROUTES = 2000
NUM_CONVERSATIONS, NUM_TURNS, CONVERSATIONS_BEGIN_S, BURST_AT_S = 40, 6, 2.0, 4.0


def run(invocation: Invocation) -> int:
    """Prints a row for each policy and number of frontends."""
    try:
        fronts = [int(word) for word in invocation.options["fronts"]]
    except ValueError:
        raise ConfigError("--fronts takes whole numbers", hint="--fronts 1,4,16") from None
    if not all(1 <= number <= 256 for number in fronts):
        raise ConfigError(f"--fronts is {fronts}; each must be 1..256", hint="--fronts 1,4,16")
    count = invocation.options["num_requests"]
    rows = [
        RunSummary(f"{policy}, {number} frontends", measure(policy, number, count, seed=number), policy)
        for policy in POLICIES
        for number in fronts
    ]
    rows += [
        RunSummary(f"{policy}, over sockets", bench_route.measure(policy, NUM_ROUTES), policy)
        for policy in bench_route.POLICIES
    ]
    publish(invocation, "none", rows, None)
    return 0


def measure(policy: str, num_fronts: int, count: int = 400, seed: int = 0) -> dict[str, float]:
    """A burst on idle engines; then conversations with a burst in their midst."""
    idle = World(policy, num_engines=NUM_ENGINES, num_fronts=num_fronts, seed=seed)
    alone = burst(idle, count)
    idle.run()
    busy = World(policy, num_engines=NUM_ENGINES, num_fronts=num_fronts, seed=seed)
    conversed: list[Asked] = []
    amid: list[Asked] = []
    for number in range(NUM_CONVERSATIONS):
        start_s = busy.rng.uniform(0.0, CONVERSATIONS_BEGIN_S)
        busy.after(start_s, lambda number=number: conversation(busy, number % num_fronts, NUM_TURNS, conversed))  # type: ignore[misc]
    busy.after(BURST_AT_S, lambda: amid.extend(burst(busy, count)))
    busy.run()
    first_ms = [(asked.first_s - asked.sent_s) * 1e3 for asked in (*conversed, *amid)]
    return {
        "fronts": float(num_fronts),
        "burst_least": float(min(per_engine(alone))),
        "burst_most": float(max(per_engine(alone))),
        "burst_spread": float(max(per_engine(alone)) - min(per_engine(alone))),
        "amid_spread": float(max(per_engine(amid)) - min(per_engine(amid))),
        "hit_share": sum(asked.num_cached for asked in conversed) / sum(asked.num_reachable for asked in conversed),
        "ttft_p50_ms": percentile(first_ms, 50),
        "ttft_p99_ms": percentile(first_ms, 99),
        "route_us": percentile(idle.route_s + busy.route_s, 50) * 1e6,
    }


def per_engine(requests: list[Asked]) -> list[int]:
    counts = Counter(asked.engine for asked in requests)
    return [counts[engine] for engine in range(NUM_ENGINES)]

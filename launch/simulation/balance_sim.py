"""A simulated deployment without processes or a model, under a virtual clock: the real Coordinator and the real engine cores.

Used by launch/bench/balance.py and tests. Messages take time and may overtake each other; a step's time depends on its tokens and
sequences. One seed is one run.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from trireme.coordinator.core import Coordinator
from trireme.engine_core.bench import answer
from trireme.engine_core.core import EngineCore
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.hashing import block_hashes, prompt_keys
from trireme.params import RowParams
from trireme.serving.engines.fallback_router import FallbackRouter
from trireme.topology.zones import Topology
from trireme.transport.wire.columns import unpack, unpack_ids
from trireme.transport.wire.messages import Route, StepOutputs, Submit

WIRE_S = (0.0001, 0.0005)  # message latency
REPORT_S, VIEW_S = 0.02, 0.05  # as in engine_core/reports.py and coordinator/main.py
STEP_S, TOKEN_S, ROW_S = 0.004, 0.00005, 0.0001  # a step: at least, per token, per sequence
VOCAB = 50_000
ALONE = "alone"  # in place of a policy: no coordinator, each frontend uses its own counts and an old view

LIMITS = Limits(
    max_len=4096,
    vocab_size=VOCAB,
    num_blocks=8192,
    block_size=16,
    max_num_seqs=64,
    max_num_tokens=2048,
    chunk=2048,
    max_waiting=4096,
    max_waiting_tokens=1 << 24,
)


@dataclass(eq=False, slots=True)
class Asked:
    """One request and its outcome. `num_reachable`: prompt tokens cached by any engine when it was sent."""

    front: int
    prompt: np.ndarray
    max_tokens: int
    on_end: Callable[[Asked], object] | None = None
    sent_s: float = 0.0
    first_s: float = -1.0
    engine: int = -1
    num_reachable: int = 0
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)


class SimulatedEngine:
    """An engine core that steps when it has work and reports when it has changed."""

    def __init__(self, world: World, index: int, limits: Limits, *, tells_blocks: bool) -> None:
        self.core = EngineCore(limits, engine=index)
        self._world = world
        self._is_stepping = self._is_reporting = False
        self._next_report = 0.0
        if tells_blocks:
            self.core.log_blocks()

    def submit(self, front: str, submit: Submit) -> None:
        self.core.submit(front, submit, self._world.now)
        self.step()
        self.report_soon()

    def step(self) -> None:
        """Starts the next step, unless one is running or there is no work."""
        if self._is_stepping or (plan := self.core.next_plan(self._world.now)) is None:
            return
        self._is_stepping = True
        num_tokens, num_rows = int(unpack(plan.num_tokens).sum()), len(plan.rows) // 4
        result = answer(plan)

        def done() -> None:
            self._is_stepping = False
            self.core.on_result(result, self._world.now)
            for outputs in self.core.take_outputs().values():
                self._world.later(lambda outputs=outputs: self._world.on_outputs(outputs))  # type: ignore[misc]
            self.step()
            self.report_soon()

        self._world.after(STEP_S + TOKEN_S * num_tokens + ROW_S * num_rows, done)

    def report_soon(self) -> None:
        if not self._is_reporting:
            self._is_reporting = True
            self._world.after(max(0.0, self._next_report - self._world.now), self._report)

    def _report(self) -> None:
        self._is_reporting = False
        self._next_report = self._world.now + REPORT_S
        world, load, events = self._world, self.core.stats(self._world.now), self.core.take_kv_events()

        def arrive() -> None:
            world.coordinator.engine_reported(load)
            if events is not None:
                assert world.coordinator.engine_cached(events)

        world.in_order(self, arrive)
        if events is not None and (log := self.core.scheduler.cache.pool.log) is not None and log.is_due:
            self.report_soon()


class World:
    """Engines, a coordinator (or none), frontends and their requests."""

    def __init__(
        self, policy: str, *, num_engines: int = 4, num_fronts: int = 1, seed: int = 0, limits: Limits = LIMITS
    ) -> None:
        self.now = 0.0
        self.num_fronts = num_fronts
        self.rng = random.Random(seed)
        self.route_s: list[float] = []  # real time that the coordinator took for each decision
        self._events: list[tuple[float, int, Callable[[], object], bool]] = []
        self._num_due = 0  # pending events without which the world ends
        self._order = itertools.count()
        self._asked: dict[int, Asked] = {}
        self._known: set[bytes] = set()
        self._last_arrival: dict[object, float] = {}
        self._limits = limits
        self._by_prefix = policy.startswith("prefix")
        self._routers = [FallbackRouter(random.Random(seed + i)) for i in range(num_fronts)] if policy == ALONE else []
        self.coordinator = Coordinator(
            num_engines,
            "p2c" if policy == ALONE else policy,
            random.Random(seed),
            fleet=Topology(),
            block_size=limits.block_size,
        )
        self.engines = [SimulatedEngine(self, i, limits, tells_blocks=self._by_prefix) for i in range(num_engines)]
        for engine in self.engines:
            self.coordinator.engine_connected(engine.core.engine, 0)
            self.coordinator.engine_reported(engine.core.stats(0.0))
        if self._routers:
            self._publish()

    # ------------------------------------------------------------ time

    def after(self, delay_s: float, event: Callable[[], object], *, keeps_running: bool = True) -> None:
        self._num_due += keeps_running
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event, keeps_running))

    def later(self, event: Callable[[], object]) -> None:
        """Schedules an event after a message latency; messages may overtake each other."""
        self.after(self.rng.uniform(*WIRE_S), event)

    def in_order(self, source: object, event: Callable[[], object]) -> None:
        """Likewise for messages of one connection, which stay in order."""
        due = max(self.now + self.rng.uniform(*WIRE_S), self._last_arrival.get(source, 0.0))
        self._last_arrival[source] = due
        self.after(due - self.now, event)

    def run(self) -> None:
        """Runs until no work is left."""
        while self._num_due:
            self.now, _, event, keeps_running = heapq.heappop(self._events)
            self._num_due -= keeps_running
            event()
        assert not self._asked, f"{len(self._asked)} requests never ended"

    # ------------------------------------------------------------ requests

    def ask(self, asked: Asked) -> None:
        """Sends a request from its frontend."""
        rid = next(self._order)
        self._asked[rid] = asked
        asked.sent_s = self.now
        asked.num_reachable = self._reachable(asked.prompt)
        if self._routers:
            router = self._routers[asked.front]
            engine = router.choose(range(len(self.engines)))
            router.started(engine)
            self._submit(rid, asked, engine, 0)
        else:
            keys = prompt_keys(asked.prompt, self._limits.block_size) if self._by_prefix else b""
            self.later(lambda: self._route(rid, asked, keys))

    def _route(self, rid: int, asked: Asked, keys: bytes) -> None:
        route = Route(rid, len(asked.prompt), prefix=keys)
        began = time.perf_counter()
        routed = self.coordinator.route(f"front-{asked.front}", route, self.now)
        self.route_s.append(time.perf_counter() - began)
        self.later(lambda: self._submit(rid, asked, routed.engine, routed.ticket))

    def _submit(self, rid: int, asked: Asked, engine: int, ticket: int) -> None:
        asked.engine = engine
        front = f"front-{asked.front}"
        submit = Submit(rid, asked.prompt, RowParams(asked.max_tokens), ticket=ticket)
        self.in_order((front, engine), lambda: self.engines[engine].submit(front, submit))

    def on_outputs(self, outputs: StepOutputs) -> None:
        """Records the tokens, first-token times and ends of one step's outputs."""
        for first in outputs.firsts:
            self._asked[first.rid].first_s = self.now
            self._asked[first.rid].num_cached = first.num_cached
        for rid, token in zip(unpack_ids(outputs.rids).tolist(), unpack(outputs.tokens).tolist(), strict=True):
            self._asked[rid].tokens.append(token)
        for end in outputs.ends:
            assert end.reason == "length", end
            asked = self._asked.pop(end.rid)
            if self._routers:
                self._routers[asked.front].ended(asked.engine)
            written = np.concatenate([asked.prompt, np.array(asked.tokens[:-1], np.int32)])
            self._known.update(block_hashes(written, self._limits.block_size))
            if asked.on_end is not None:
                asked.on_end(asked)

    def _reachable(self, prompt: np.ndarray) -> int:
        """Prompt tokens that an unbounded cache shared by all engines would hold."""
        hashes = block_hashes(prompt[:-1], self._limits.block_size)
        known = itertools.takewhile(self._known.__contains__, hashes)
        return sum(1 for _ in known) * self._limits.block_size

    def _publish(self) -> None:
        view = self.coordinator.view()
        for router in self._routers:
            router.on_view(view)
        self.after(VIEW_S, self._publish, keeps_running=False)


# ---------------------------------------------------------------- workloads


def burst(world: World, count: int, num_tokens: int = 128, max_tokens: int = 16) -> list[Asked]:
    """Uniform requests with different prompts, all at once, spread over the frontends."""
    dice = np.random.default_rng(world.rng.getrandbits(32))
    requests = [
        Asked(i % world.num_fronts, dice.integers(0, VOCAB, num_tokens, dtype=np.int32), max_tokens)
        for i in range(count)
    ]
    for asked in requests:
        world.ask(asked)
    return requests


def conversation(
    world: World, front: int, turns: int, found: list[Asked], *, think_s: float = 1.0, max_tokens: int = 32
) -> None:
    """One conversation: each turn's prompt is the previous one, its answer, and 40 to 200 more tokens. Its requests are appended
    to `found`."""
    dice = np.random.default_rng(world.rng.getrandbits(32))

    def turn(known: np.ndarray, left: int) -> None:
        more = dice.integers(0, VOCAB, dice.integers(40, 200), dtype=np.int32)

        def ended(asked: Asked) -> None:
            if left > 1:
                text = np.concatenate([asked.prompt, np.array(asked.tokens, np.int32)])
                world.after(think_s * dice.uniform(0.5, 1.5), lambda: turn(text, left - 1))

        asked = Asked(front, np.concatenate([known, more]), max_tokens, ended)
        found.append(asked)
        world.ask(asked)

    turn(np.zeros(0, np.int32), turns)

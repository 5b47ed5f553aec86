"""Cost of the coordinator: its real process over real sockets, with engines that only report.

Called by launch/bench/balance.py. CPU time is that of the coordinator's process, reports of engines and views for frontends
included; the round trip is a frontend's, one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from trireme.config import CoordinatorConfig, EngineConfig, LaunchConfig, ModelConfig, ParallelConfig
from trireme.errors import EngineError
from trireme.hashing import KEY_BYTES
from trireme.metrics import percentile
from trireme.transport.process.boot import reap, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.names import Connection
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.messages import Boot, FromCoordinator, KVEvents, Load, Role, Routed
from trireme.transport.wire.messages import Route as RouteRequest

POLICIES = ("p2c", "least", "prefix")
START_S, ANSWER_S = 30.0, 10.0
REPORT_S = 0.02  # as busy engines do
PROMPT_TOKENS, PREFIX_KEYS, CACHED_KEYS = 1024, 64, 32
NUM_TOLD = 256  # prompts whose beginning an engine has cached


class _RoutedEngines:
    """Reporting engines and one asking frontend, in this process."""

    def __init__(self, boot: Boot, num_engines: int) -> None:
        self.poller = Poller()
        self.routed: list[Routed] = []
        names: list[tuple[Role, str, int]] = [("front", "front-0", 0)]
        names += [("engine", f"engine-{index}", index) for index in range(num_engines)]
        self.links = [
            self._link(msgspec.structs.replace(boot, role=role, name=name, index=i)) for role, name, i in names
        ]
        self.front, *self.engines = self.links
        self._admitted = [0] * num_engines
        self._seq = self._next_report = 0.0

    def _link(self, boot: Boot) -> Connection:
        link = Connection.open(boot, "coordinator", FromCoordinator)
        self.poller.add(link, lambda: self._receive(link))
        return link

    def _receive(self, link: Connection) -> None:
        self.routed.extend(message for message in link.receive() if isinstance(message, Routed))

    def join(self) -> None:
        """Returns when the coordinator routes to engines. Raises EngineError."""
        until = time.monotonic() + START_S
        while any(link.welcome is None for link in self.links) or self.ask(0, b"").engine < 0:
            self.turn()
            if time.monotonic() > until:
                raise EngineError(f"the coordinator knows no engine after {START_S:g} s")

    def tell_blocks(self) -> None:
        """Reports to the coordinator that each engine has cached the first blocks of its share of the prompts, and as many
        others."""
        for index, engine in enumerate(self.engines):
            heads = [_prompt(rid, len(self.engines))[: CACHED_KEYS * KEY_BYTES] for rid in _turns(index, self.engines)]
            others = np.random.default_rng(index).bytes(NUM_TOLD * CACHED_KEYS * KEY_BYTES)
            blocks = 2 * NUM_TOLD * CACHED_KEYS
            engine.send(KVEvents(index, 0, 1, b"".join(heads) + others, b"", blocks, True))
        self.ask(0, b"")

    def ask(self, rid: int, keys: bytes) -> Routed:
        """One request's round trip. Raises EngineError when no answer comes."""
        until = time.monotonic() + ANSWER_S
        self.front.send(RouteRequest(rid, PROMPT_TOKENS, prefix=keys))
        while not self.routed:
            self.turn()
            if time.monotonic() > until:
                raise EngineError(f"the coordinator did not answer within {ANSWER_S:g} s")
        answer = self.routed.pop()
        if answer.engine >= 0:
            self._admitted[answer.engine] = answer.ticket
        return answer

    def turn(self) -> None:
        """One iteration: sends the engines' due reports and polls for 1 ms."""
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_S
            self._seq += 1
            for index, engine in enumerate(self.engines):
                admitted = {"front-0": self._admitted[index]}
                engine.send(Load(index, 0, int(self._seq), int(self._seq), 0, 8, 0, 4096, 64, 1024, 0.0, admitted, 0))
        self.poller.wait(0.001)

    def close(self) -> None:
        for link in self.links:
            self.poller.remove(link)
            link.close()


def _prompt(rid: int, num_engines: int) -> bytes:
    """Prefix keys of a request: the beginning is cached by one engine, the rest by none."""
    told = rid % (NUM_TOLD * num_engines)
    head = np.random.default_rng((1, told)).bytes(CACHED_KEYS * KEY_BYTES)
    return head + np.random.default_rng((2, rid)).bytes((PREFIX_KEYS - CACHED_KEYS) * KEY_BYTES)


def _turns(engine: int, engines: Sized) -> range:
    return range(engine, NUM_TOLD * len(engines), len(engines))


def measure(policy: str, num_requests: int, num_engines: int = 4) -> dict[str, float]:
    """Round trip and CPU time of `num_requests` decisions, each with the keys of a prompt of 1024 tokens."""
    with _coordinator(policy, num_engines) as (boot, pid):
        fleet = _RoutedEngines(boot, num_engines)
        try:
            fleet.join()
            fleet.tell_blocks()
            prompts = [_prompt(rid, num_engines) if policy == "prefix" else b"" for rid in range(1, num_requests + 1)]
            before, began = _cpu_s(pid), time.perf_counter()
            trips = []
            for rid, keys in enumerate(prompts, start=1):
                sent = time.perf_counter()
                fleet.ask(rid, keys)
                trips.append(time.perf_counter() - sent)
            wall_s, cpu_s = time.perf_counter() - began, _cpu_s(pid) - before
        finally:
            fleet.close()
    return {
        "requests": float(num_requests),
        "per_second": num_requests / wall_s,
        "trip_p50_us": percentile(trips, 50) * 1e6,
        "trip_p99_us": percentile(trips, 99) * 1e6,
        "coordinator_us": cpu_s / num_requests * 1e6,
    }


@contextmanager
def _coordinator(policy: str, num_engines: int) -> Iterator[tuple[Boot, int]]:
    """A coordinator process; yields the Boot to join it, and its pid."""
    config = EngineConfig(
        model=ModelConfig(model="none"),
        parallel=ParallelConfig(dp=num_engines),
        coordinator=CoordinatorConfig(balance=policy),  # type: ignore[arg-type]
        launch=LaunchConfig(log_level="warning"),
    )
    run_dir = RunDir()
    boot = Boot("coordinator", "coordinator", 0, msgspec.msgpack.encode(config), b"route", run_dir.path)
    child, poller, reports = spawn("trireme.coordinator.main", boot), Poller(), list[object]()
    try:
        poller.add(child, lambda: reports.extend(child.receive()))
        until = time.monotonic() + START_S
        while not child.is_ready:
            if child.is_dead or time.monotonic() > until:
                raise EngineError(f"the coordinator is not ready after {START_S:g} s: {reports}")
            poller.wait(0.05)
        yield boot, child.pid
    finally:
        poller.remove(child)
        reap([child], 5.0)
        run_dir.remove()


def _cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, from the scheduler's statistics."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

"""Work stealing: who is asked, what an engine gives back, and that no interleaving of it with deaths loses or doubles a row.

The last part runs the real Coordinator, EngineCores and EngineClients over links whose messages arrive when the test says so.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.engine_driver import Driver, make_limits, make_worker
from tests.unit.test_router import coordinator, load
from trireme.coordinator.core import Coordinator
from trireme.coordinator.ledger import Outstanding
from trireme.coordinator.stealing import COOLDOWN_S, MAX_ROWS, PATIENCE_S, Stealing
from trireme.engine_core.core import EngineCore
from trireme.params import RowParams
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Stream
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.messages import (
    Abort,
    End,
    GiveBack,
    Load,
    Released,
    Route,
    Submit,
    Welcome,
    Wire,
)
from trireme.workers.fake import FakeOptions, expected_tokens

NOTHING = Outstanding()


def orders(*loads: Load, capacity: int = 8, now: float = 0.0, machine: Stealing | None = None) -> list[GiveBack]:
    return (machine or Stealing(capacity)).orders(loads, lambda engine: NOTHING, now)


def full(engine: int, waiting: int = 10, running: int = 8, wait_s: float = 1.0, **fields: object) -> Load:
    return load(engine, num_waiting=waiting, num_running=running, oldest_wait_s=wait_s, **fields)


# ---------------------------------------------------------------- who is asked


def test_an_idle_engine_takes_half_of_the_surplus_from_the_fullest() -> None:
    assert orders(full(0), full(1, waiting=20), load(2)) == [GiveBack(1, 0, 8, 2)]
    assert orders(full(0, waiting=4), load(2)) == [GiveBack(0, 0, 4, 2)]
    assert orders(full(0, waiting=5, running=1), load(2)) == [GiveBack(0, 0, 3, 2)]
    assert orders(full(0, waiting=900), load(2), capacity=500) == [GiveBack(0, 0, MAX_ROWS, 2)]


def test_several_idle_engines_are_paired_with_several_full_ones() -> None:
    found = orders(full(0), load(1), full(2, waiting=30), load(3, num_running=6))
    assert found == [GiveBack(2, 0, 8, 1), GiveBack(0, 0, 2, 3)]


@pytest.mark.parametrize(
    "loads",
    [
        (full(0), full(1)),
        (load(0, num_running=8), load(1)),  # nobody waits
        (full(0, wait_s=PATIENCE_S / 2), load(1)),  # not for long
        (full(0), load(1, num_running=8)),  # no room
        (full(0), load(1, blocks_used=90)),  # nor for KV
        (full(0, waiting=1, running=0), load(1)),  # it would gain nothing
        (full(0),),
    ],
)
def test_nobody_is_asked_when_it_would_not_help(loads: tuple[Load, ...]) -> None:
    assert orders(*loads) == []


def test_tickets_on_the_way_count_as_work_and_both_rest_after_an_order() -> None:
    machine = Stealing(8)
    assert machine.orders([full(0), load(1)], lambda engine: Outstanding(1, 1, 9) if engine else NOTHING, 0.0) == []
    assert orders(full(0), load(1), machine=machine)
    assert orders(full(0), load(1), machine=machine, now=COOLDOWN_S / 2) == []
    assert orders(full(0), load(2), machine=machine, now=COOLDOWN_S / 2) == []
    assert orders(full(0), load(1), machine=machine, now=COOLDOWN_S)


def test_without_capacity_nothing_is_stolen() -> None:
    assert orders(full(0), load(1), capacity=0) == []


def test_engines_that_are_not_ready_take_no_part() -> None:
    core = Coordinator(3, "p2c", random.Random(0), steals_for=8)
    for engine in range(3):
        core.engine_connected(engine, 4)
    core.engine_reported(full(0, epoch=4))
    assert core.orders(0.0) == []
    core.engine_reported(load(1, epoch=4))
    core.engine_lost(1, 4, "killed")
    assert core.orders(0.0) == []
    core.engine_reported(load(2, epoch=4))
    assert core.orders(0.0) == [GiveBack(0, 4, 8, 2)]
    assert coordinator(2).orders(0.0) == []


# ---------------------------------------------------------------- what an engine gives back


def returned(driver: Driver) -> list[tuple[int, int, float]]:
    return [entry for outputs in driver.core.take_outputs().values() for entry in outputs.returned]


def test_the_newest_waiting_rows_are_given_back_and_everything_else_goes_on() -> None:
    driver = Driver(make_limits(max_num_seqs=2))
    rows = [driver.submit(3 + i, 6) for i in range(6)]
    driver.step()
    driver.now = 2.0
    assert driver.core.reclaim(3, 1, driver.now) == 3
    found = returned(driver)
    assert [(rid, to) for rid, to, _ in found] == [(6, 1), (5, 1), (4, 1)]
    assert all(waited_s == pytest.approx(2.0, abs=0.02) for _, _, waited_s in found)
    driver.run()
    assert all(row.end.reason == "length" for row in rows[:3])
    assert all(not row.ends and not row.tokens for row in rows[3:])
    assert driver.core.counters.returned == 3


def test_rows_that_ran_moved_or_are_pinned_stay() -> None:
    driver = Driver(make_limits(max_num_seqs=1, num_blocks=6))
    driver.submit(8, 12)
    driver.step()
    for extra in ({"num_moves": 1}, {"stays": True}):
        rid = 100 + len(extra)
        message = Submit(rid, np.arange(3, dtype=np.int32), RowParams(4, temperature=0.0), **extra)  # type: ignore[arg-type]
        driver.core.submit("front-1", message, 0.0)
        assert driver.core.reclaim(9, 1, 1.0) == 0
        driver.core.abort("front-1", [rid])
    assert driver.core.reclaim(0, 1, 1.0) == 0


def test_preempted_rows_stay() -> None:
    driver = Driver(make_limits(num_blocks=8, max_num_seqs=4))
    rows = [driver.submit(10, 16) for _ in range(3)]
    for _ in range(200):
        driver.step()
        assert driver.core.reclaim(9, 1, driver.now) == 0 or not driver.core.scheduler.num_preemptions
    assert driver.core.scheduler.num_preemptions > 0
    assert sum(len(row.ends) for row in rows) + driver.core.counters.returned == 3


# ---------------------------------------------------------------- every interleaving

NUM_ENGINES, NUM_FRONTS, ROWS = 3, 2, 1  # one row at a time: the others wait
LIMITS = make_limits(max_num_seqs=ROWS)
FAKE = FakeOptions()


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can go on, and jumps to the next timer when nothing can."""

    _now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Pipe:
    """One direction of a connection: messages in order, each delivered when the test says so."""

    def __init__(self, receive: Callable[[Any], object]) -> None:
        self.receive = receive
        self.messages: deque[Any] = deque()

    def deliver(self) -> bool:
        if self.messages:
            self.receive(self.messages.popleft())
            return True
        return False


class SlowLink:
    """A front end's side of a connection. What is sent to a former life of the peer gets lost."""

    def __init__(self, there: Pipe, back: Pipe) -> None:
        self.there, self.back = there, back
        self.epoch = 0  # of the peer, by its last Welcome
        self.is_up = False
        self.server_stalled = ""
        self.silent_s = 0.0

    def send(self, message: Wire) -> bool:
        if self.is_up:
            self.there.messages.append((self.epoch, message))
        return self.is_up

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.is_up = False


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.num_deaths = 0
        self.num_stolen = 0
        self.placements: Counter[int] = Counter()
        self.streams: list[tuple[int, Replay, Stream, list[Any]]] = []
        self.pending: list[asyncio.Task[None]] = []
        self.epochs = [0] * NUM_ENGINES
        self.cores: list[EngineCore] = []
        self.workers: list[Any] = []
        self.coordinator = self._new_coordinator(0)
        self.coordinator_epoch = 0
        self.fronts_alive = [True] * NUM_FRONTS
        self.reports = [Pipe(self._on_load) for _ in range(NUM_ENGINES)]
        self.orders = [Pipe(lambda order, e=e: self._on_order(e, order)) for e in range(NUM_ENGINES)]  # type: ignore[misc]
        self.engine_links: dict[tuple[int, int], SlowLink] = {}
        self.coordinator_links: dict[int, SlowLink] = {}
        for engine in range(NUM_ENGINES):
            self._start(engine)
        self.clients = [self._client(front) for front in range(NUM_FRONTS)]
        for link in (*self.engine_links.values(), *self.coordinator_links.values()):
            link.is_up = True
        for (_, engine), link in self.engine_links.items():
            link.back.receive(self._welcome(engine))
        for engine in range(NUM_ENGINES):
            self.coordinator.engine_connected(engine, 0)
            self.report(engine)
            self.reports[engine].deliver()

    # ------------------------------------------------------------ parts

    @staticmethod
    def _new_coordinator(epoch: int) -> Coordinator:
        return Coordinator(NUM_ENGINES, "random", random.Random(epoch), epoch=epoch, steals_for=ROWS)

    def _start(self, engine: int) -> None:
        self.cores[engine : engine + 1] = [EngineCore(LIMITS, engine=engine, epoch=self.epochs[engine], check=True)]
        self.workers[engine : engine + 1] = [make_worker(LIMITS, FAKE)]

    def _welcome(self, engine: int) -> Welcome:
        facts = self.cores[engine].facts()
        return Welcome(1, b"", "engine", f"engine-{engine}", self.epochs[engine], 1, facts)

    def _client(self, front: int) -> EngineClient:
        def to_engine(engine: int) -> Callable[[Callable[[Any], None]], SlowLink]:
            def connect(on_message: Callable[[Any], None]) -> SlowLink:
                def receive(message: Any) -> None:
                    if isinstance(message, Welcome):
                        link.epoch = message.epoch
                    on_message(message)

                link = SlowLink(Pipe(lambda sent: self._on_engine(front, engine, *sent)), Pipe(receive))
                self.engine_links[front, engine] = link
                return link

            return connect

        def to_coordinator(on_message: Callable[[Any], None]) -> SlowLink:
            link = SlowLink(Pipe(lambda sent: self._on_coordinator(front, sent[1])), Pipe(on_message))
            self.coordinator_links[front] = link
            return link

        client = EngineClient(
            [to_engine(engine) for engine in range(NUM_ENGINES)],
            to_coordinator,
            rng=random.Random(front),
            migration_limit=99,
            clock=asyncio.get_running_loop().time,
        )
        client.start()
        return client

    def pipes(self) -> list[Pipe]:
        links = (*self.engine_links.values(), *self.coordinator_links.values())
        return [*(link.there for link in links), *(link.back for link in links), *self.reports, *self.orders]

    # ------------------------------------------------------------ messages

    def _on_engine(self, front: int, engine: int, epoch: int, message: Any) -> None:
        core = self.cores[engine]
        if epoch != core.epoch:
            return
        if isinstance(message, Submit):
            core.submit(f"front-{front}", message, self.now)
        elif isinstance(message, Abort):
            core.abort(f"front-{front}", message.rids)
        else:
            core.front_gone(f"front-{front}")
        self._send_outputs(engine)

    def _on_coordinator(self, front: int, message: Any) -> None:
        if isinstance(message, Route):
            routed = self.coordinator.route(f"front-{front}", message, self.now)
            self.coordinator_links[front].back.messages.append(routed)
        elif isinstance(message, Released):
            self.coordinator.released(f"front-{front}", message)
        else:
            self.coordinator.front_lost(f"front-{front}")

    def _on_load(self, report: Load) -> None:
        self.coordinator.engine_reported(report)

    def _on_order(self, engine: int, order: GiveBack) -> None:
        core = self.cores[engine]
        if order.epoch == core.epoch:
            self.num_stolen += core.reclaim(order.count, order.to, self.now)
            self._send_outputs(engine)

    def _send_outputs(self, engine: int) -> None:
        for name, outputs in self.cores[engine].take_outputs().items():
            front = int(name.partition("-")[2])
            for rid in outputs.placed:
                request = self.cores[engine].requests.get((name, rid))
                if request is not None:
                    self.placements[request.params.seed] += 1
            if self.engine_links[front, engine].is_up:
                self.engine_links[front, engine].back.messages.append(outputs)

    # ------------------------------------------------------------ actions

    def submit(self, front: int, num_tokens: int) -> None:
        if not self.fronts_alive[front]:
            return
        seed = len(self.streams) + len(self.pending) + 1
        prompt = np.array([seed % 250 + 1, front + 1, 7], np.int32)
        replay = Replay(prompt, RowParams(num_tokens, temperature=0.0, seed=seed))
        self.pending.append(asyncio.ensure_future(self._send(front, replay)))

    async def _send(self, front: int, replay: Replay) -> None:
        stream = await self.clients[front].submit([replay])
        self.streams.append((front, replay, stream, []))

    def abort(self, number: int) -> None:
        if self.streams:
            self.streams[number % len(self.streams)][2].close()

    def step(self, engine: int) -> bool:
        core = self.cores[engine]
        plan = core.next_plan(self.now)
        self._send_outputs(engine)
        if plan is not None:
            core.on_result(self.workers[engine].execute(plan), self.now)
            self._send_outputs(engine)
        return plan is not None

    def report(self, engine: int) -> None:
        self.reports[engine].messages.append(self.cores[engine].stats(self.now))

    def give_orders(self) -> None:
        for order in self.coordinator.orders(self.now):
            self.orders[order.engine].messages.append(order)

    def kill_engine(self, engine: int, keep: int) -> None:
        """Of what it had sent, each front end still gets the first `keep` messages. It is started again at once."""
        self.num_deaths += 1
        self.epochs[engine] += 1
        self._start(engine)
        for (front, index), link in self.engine_links.items():
            if index == engine and self.fronts_alive[front]:
                link.there.messages.clear()
                kept = list(link.back.messages)[:keep]
                link.back.messages = deque([*kept, Disconnected("killed"), self._welcome(engine)])
        self.reports[engine].messages.clear()
        self.orders[engine].messages.clear()
        self.coordinator.engine_connected(engine, self.epochs[engine])

    def kill_coordinator(self) -> None:
        self.coordinator_epoch += 1
        self.coordinator = self._new_coordinator(self.coordinator_epoch)
        for engine in range(NUM_ENGINES):
            self.reports[engine].messages.clear()
            self.orders[engine].messages.clear()
            self.coordinator.engine_connected(engine, self.epochs[engine])
        for front, link in self.coordinator_links.items():
            link.there.messages.clear()
            link.back.messages.clear()
            if self.fronts_alive[front]:
                link.back.messages.append(Disconnected("killed"))

    def kill_front(self, front: int) -> None:
        if not self.fronts_alive[front]:
            return
        self.fronts_alive[front] = False
        links = [link for (index, _), link in self.engine_links.items() if index == front]
        for link in (*links, self.coordinator_links[front]):
            link.is_up = False
            link.back.messages.clear()
            link.there.messages.append((link.epoch, "gone"))

    # ------------------------------------------------------------ truth

    def check(self) -> None:
        """No row is on two engines, and none has been started more often than engines have died."""
        live = Counter(request.params.seed for core in self.cores for request in core.requests.values())
        assert all(count == 1 for count in live.values()), live
        assert all(count <= 1 + self.num_deaths for count in self.placements.values()), self.placements

    async def settle(self) -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Everything is delivered and computed; then every row of every living front end has ended once, with its tokens."""
        num_idle = 0
        while num_idle < 1000:
            delivered = [pipe.deliver() for pipe in self.pipes()]
            stepped = [self.step(engine) for engine in range(NUM_ENGINES)]
            await self.settle()
            self.check()
            if not any(delivered) and not any(stepped):
                if all(stream.num_open == 0 for front, _, stream, _ in self.streams if self.fronts_alive[front]):
                    break
                num_idle += 1
                await asyncio.sleep(0.1)  # some timer of a front end
        for front, replay, stream, events in self.streams:
            if not self.fronts_alive[front]:
                continue
            assert stream.num_open == 0, f"a row of front-{front} never ended"
            events += await stream.next()
            found = [event for _, event in events if isinstance(event, End)]
            tokens = [event for _, event in events if isinstance(event, int)]
            expected = expected_tokens(replay.prompt.tolist(), replay.params, FAKE, replay.params.max_tokens)
            if not found:
                assert tokens == expected[: len(tokens)]  # it was aborted
            elif found[0].error_code == "quarantined":
                assert self.num_deaths >= 2
            else:
                assert len(found) == 1
                assert (found[0].reason, found[0].error) == ("length", "")
                assert tokens == expected
        for core in self.cores:
            assert core.is_idle, core.requests
            core.check_idle()
        for task in self.pending:
            if task.done():
                task.result()
            else:
                assert not all(self.fronts_alive), "a request was never placed"
                task.cancel()
        for client in self.clients:
            client.close()
        await self.settle()


ENGINES, FRONTS = st.integers(0, NUM_ENGINES - 1), st.integers(0, NUM_FRONTS - 1)
NUM_PIPES = 2 * NUM_ENGINES * NUM_FRONTS + 2 * NUM_FRONTS + 2 * NUM_ENGINES
COMMON = st.one_of(
    st.tuples(st.just("submit"), FRONTS, st.integers(1, 4)),
    st.tuples(st.just("deliver"), st.integers(0, NUM_PIPES - 1)),
    st.tuples(st.just("deliver_all")),
    st.tuples(st.just("step"), ENGINES),
    st.tuples(st.just("balance")),
)
RARE = st.one_of(
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 0.6, 2.0])),
    st.tuples(st.just("kill_engine"), ENGINES, st.integers(0, 3)),
    st.tuples(st.just("kill_coordinator")),
    st.tuples(st.just("kill_front"), FRONTS),
)


async def _play(actions: list[tuple[Any, ...]]) -> World:
    world = World()
    for name, *args in actions:
        match name:
            case "wait":
                await asyncio.sleep(args[0])
            case "deliver":
                world.pipes()[args[0]].deliver()
            case "deliver_all":
                for _ in range(4):  # answers to answers
                    for pipe in world.pipes():
                        while pipe.deliver():
                            pass
                    await world.settle()
            case "balance":  # time passes, engines report, the coordinator gives orders
                world.now += COOLDOWN_S
                for engine in range(NUM_ENGINES):
                    world.report(engine)
                    while world.reports[engine].deliver():
                        pass
                world.give_orders()
            case _:
                getattr(world, name)(*args)
        await world.settle()
        world.check()
    await world.finish()
    return world


def play(actions: list[tuple[Any, ...]]) -> World:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_play(actions))


MANY = [("submit", i % 2, 3) for i in range(8)] + [("deliver_all",)]
STEAL = [*MANY, ("step", 0), ("step", 1), ("step", 2), ("balance",), ("deliver_all",)]


@given(st.lists(st.one_of(COMMON, COMMON, COMMON, RARE), max_size=60))
@settings(max_examples=400, deadline=None)
@example([*STEAL, ("kill_engine", 0, 0), ("kill_engine", 1, 1), ("balance",), ("kill_engine", 2, 2)])
@example([*STEAL, ("kill_coordinator",), ("deliver_all",), ("balance",)])
@example([*STEAL, ("kill_front", 0), ("balance",), ("kill_front", 1)])
def test_no_interleaving_loses_or_doubles_a_row(actions: list[tuple[Any, ...]]) -> None:
    play(actions)


THEFT: list[tuple[Any, ...]] = [*MANY, *[("step", 2)] * 40, ("deliver_all",), ("step", 0), ("step", 1), ("balance",)]


@given(st.lists(st.one_of(COMMON, RARE), max_size=30))
@settings(max_examples=200, deadline=None)
@example([("deliver_all",), ("deliver_all",), ("kill_engine", 0, 0), ("kill_engine", 1, 0), ("deliver_all",)])
@example([("deliver_all",), ("deliver_all",), ("kill_engine", 2, 0), ("deliver_all",)])
@example([("deliver_all",), ("kill_engine", 0, 1), ("kill_engine", 1, 1), ("deliver_all",), ("kill_engine", 2, 0)])
def test_nor_one_that_begins_with_an_order_on_its_way(actions: list[tuple[Any, ...]]) -> None:
    play([*THEFT, *actions])


def test_rows_are_stolen_in_these_tests_at_all() -> None:
    world = play([*THEFT, ("deliver_all",)])
    assert world.num_stolen > 0
    assert sum(world.placements.values()) == len(world.streams) == 8
    assert play([*THEFT, ("kill_coordinator",), ("deliver_all",)]).num_stolen == 0

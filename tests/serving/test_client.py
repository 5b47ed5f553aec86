"""The engine client: every choice ends exactly once; an engine's death is its own rows' business; placement."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.serving.engines import FakeEngine, client_of, words
from trireme.errors import EngineDeadError, EngineError, NotFoundError
from trireme.params import RowParams
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.fallback_router import FallbackRouter
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Event, Stream
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.messages import Abort, End, Load, Member, Released, Route, Routed, Submit, View


def replay(text: str = "hi", *, max_tokens: int = 5, prompt_index: int = 0, choice: int = 0, **params: Any) -> Replay:
    row = RowParams(max_tokens=max_tokens, choice=choice, eos_token_ids=(257,), **params)
    return Replay(np.array(words(text), dtype=np.int32), row, prompt_index=prompt_index)


async def drain(stream: Stream) -> list[Event]:
    events: list[Event] = []
    while batch := await stream.next():
        events += batch
    return events


def ends(events: list[Event]) -> list[tuple[int, str, str]]:
    return [(index, end.reason, end.error_code) for index, end in events if isinstance(end, End)]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(words("abcdefghijklmnop"))
    yield engine
    engine.stop()


async def test_tokens_then_one_end(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    one = replay()
    stream = await client.submit([one])
    events = await drain(stream)
    assert [value for _, value in events if isinstance(value, int)] == words("abcde")
    assert ends(events) == [(0, "length", "")]
    assert events[-1][1] == End(1, "length")
    assert list(one.emitted) == words("abcde")
    assert client.num_choices == 0
    assert stream.is_done
    assert await stream.next() == []


async def test_one_wake_up_per_step_for_many_choices(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    stream = await client.submit([replay(choice=i, max_tokens=8) for i in range(4)])
    wake_ups = 0
    while batch := await stream.next():
        wake_ups += 1
        assert sum(isinstance(value, int) for _, value in batch) % 4 == 0
    assert wake_ups <= engine.step == 8


async def test_without_migration_a_death_ends_only_its_own_rows_and_says_why() -> None:
    first, second = FakeEngine(words("x" * 50), index=0), FakeEngine(words("y" * 50), index=1, step_s=0.002)
    client = client_of(first, second, migration_limit=0)
    await client.wait_up(1)
    first.hold.clear()
    lost = await client.submit([replay(max_tokens=40)], pin=0)
    kept = await client.submit([replay(max_tokens=40)], pin=1)
    await asyncio.sleep(0.01)
    first.die("worker 0 ran out of memory")
    events = await drain(lost)
    assert ends(events) == [(0, "error", "engine_dead")]
    assert "ran out of memory" in events[-1][1].error  # type: ignore[union-attr]
    assert ends(await drain(kept)) == [(0, "length", "")]
    assert [state.is_up for state in client.states()] == [False, True]
    stream = await client.submit([replay()])  # goes to the other one
    assert ends(await drain(stream)) == [(0, "length", "")]
    first.revive()
    first.hold.set()
    stream = await client.submit([replay()], pin=0)
    assert ends(await drain(stream)) == [(0, "length", "")]
    assert client.states()[0].epoch == 1
    for one in (first, second):
        one.stop()


async def test_late_messages_of_a_lost_row_do_nothing(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    engine.hold.clear()
    stream = await client.submit([replay()])
    stream.close()
    engine.hold.set()
    assert await drain(stream) == []
    assert client.num_choices == 0
    assert any(isinstance(message, Abort) for message in engine.log)
    engine.run_step()


async def test_abort_of_one_choice_leaves_the_others(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    stream = await client.submit([replay(choice=0), replay(choice=1)])
    stream.abort(0)
    stream.abort(0)
    events = await drain(stream)
    assert ends(events) == [(1, "length", "")]
    assert engine.aborted == [1]
    stream.close()


async def test_no_engine_and_unknown_engine(engine: FakeEngine) -> None:
    engine.is_up = False
    client = client_of(engine, engine_wait_s=0.0)
    with pytest.raises(EngineDeadError, match="not started"):
        await client.submit([replay()])
    with pytest.raises(NotFoundError):
        await client.submit([replay()], pin=1)
    with pytest.raises(TimeoutError):
        await client.wait_up(0.01)
    assert client.capacity == 0


async def test_full_queue_is_an_error_not_a_hang(engine: FakeEngine) -> None:
    client = client_of(engine, engine_wait_s=0.2)
    await client.wait_up(1)
    engine.takes_nothing = True
    stream = await client.submit([replay()])
    assert ends(await drain(stream)) == [(0, "error", "engine_dead")]


async def test_calls(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    assert (await client.call(0, "stats"))["num_running"] == 0
    with pytest.raises(EngineError, match="no method"):
        await client.call(0, "explode")


async def test_cancelling_a_reader_loses_nothing(engine: FakeEngine) -> None:
    client = client_of(engine)
    await client.wait_up(1)
    engine.hold.clear()
    stream = await client.submit([replay()])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.next(), 0.01)
    engine.hold.set()
    assert ends(await drain(stream)) == [(0, "length", "")]


def test_replay_continues_after_emitted_tokens() -> None:
    one = replay("hi", max_tokens=9, seed=5)
    assert one.submit(1).num_replayed == 0
    one.emitted.extend(words("ab"))
    again = one.submit(2, ticket=7)
    assert again.prompt.tolist() == words("hiab")
    assert again.prompt.dtype == np.int32
    assert (again.num_replayed, again.ticket, again.params.seed, again.params.max_tokens) == (2, 7, 5, 9)
    assert one.prompt.tolist() == words("hi")


# ---------------------------------------------------------------- placement


class FakeCoordinator:
    """Answers Route as told by `answer`; None leaves it unanswered."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.log: list[Any] = []
        self.is_up = True
        self.server_stalled, self.silent_s = "", 0.0

    def __call__(self, on_message: Any) -> FakeCoordinator:
        self.on_message = on_message
        return self

    def send(self, message: Any) -> bool:
        self.log.append(message)
        if isinstance(message, Route) and (routed := self.answer(message)) is not None:
            asyncio.get_running_loop().call_soon(self.on_message, routed)
        return self.is_up

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None: ...


async def two_engines(coordinator: FakeCoordinator, **options: Any) -> tuple[FakeEngine, FakeEngine, EngineClient]:
    engines = FakeEngine(words("a" * 9), index=0), FakeEngine(words("b" * 9), index=1)
    client = client_of(*engines, coordinator=coordinator, **options)
    await client.wait_up(1)
    return *engines, client


async def test_routes_carry_the_place_of_the_front_end_or_that_of_the_request() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, 0, 0, 1))
    client = EngineClient([FakeEngine(words("a"))], coordinator, label="rack-a")
    client.start()
    await client.wait_up(1)
    await drain(await client.submit([replay()]))
    await drain(await client.submit([replay()], label="rack-b"))
    assert [route.label for route in coordinator.log] == ["rack-a", "rack-b"]


async def test_a_front_end_with_a_share_of_the_engines_knows_them_by_their_numbers() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, 4, 0, 9))
    engines = [FakeEngine(words(letter * 9), index=index) for index, letter in ((3, "a"), (4, "b"))]
    client = EngineClient(engines, coordinator, first_engine=3)
    client.start()
    await client.wait_up(1)
    await drain(await client.submit([replay()]))
    await drain(await client.submit([replay()], pin=4))
    assert [len([m for m in engine.log if isinstance(m, Submit)]) for engine in engines] == [0, 2]
    assert [state.engine for state in client.states()] == [3, 4]
    assert (await client.call(4, "stats"))["num_running"] == 0
    for pin in (0, 2, 5):
        with pytest.raises(NotFoundError, match=r"3\.\.4"):
            await client.submit([replay()], pin=pin)
    member = Member(0, 0, "ready"), Member(3, 0, "ready", in_flight=7), Member(4, 0, "draining")
    coordinator.on_message(View(1, list(member)))
    assert await client.loads() == {3: {"state": "ready", "in_flight": 7}, 4: {"state": "draining", "in_flight": 0}}
    coordinator.answer = lambda route: Routed(route.rid, 0, 0, 1)  # nonsense: not one of ours
    await drain(await client.submit([replay()]))


async def test_coordinator_decides_and_its_ticket_travels() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, 1, 0, 41))
    first, second, client = await two_engines(coordinator)
    stream = await client.submit([replay(choice=i) for i in range(2)])
    await drain(stream)
    submits = [message for message in second.log if isinstance(message, Submit)]
    assert [submit.ticket for submit in submits] == [41, 41]
    assert not first.log
    (route,) = [message for message in coordinator.log if isinstance(message, Route)]
    assert (route.num_tokens, route.num_choices, route.pin) == (2, 2, -1)


async def test_a_place_in_a_life_that_has_ended_is_returned_at_once() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, 1, 0, 41))
    first, second, client = await two_engines(coordinator)
    second.die("killed")
    begun = asyncio.get_running_loop().time()
    await drain(await client.submit([replay()]))
    assert asyncio.get_running_loop().time() - begun < 0.5
    assert len(first.log) == 1
    assert Released(engine=1, epoch=0, count=1) in coordinator.log


async def test_nothing_goes_to_an_engine_that_makes_no_progress() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, 1, 0, 41))
    first, second, client = await two_engines(coordinator)
    second.stalled = "step 7 has run for 3.0 s"
    for _ in range(4):
        await drain(await client.submit([replay()]))
    assert len([m for m in first.log if isinstance(m, Submit)]) == 4
    assert not second.log
    assert Released(engine=1, epoch=0, count=1) in coordinator.log
    first.stalled = "likewise"  # then any is as good
    await drain(await client.submit([replay()]))
    assert len(second.log) == 1


async def test_absent_coordinator_is_replaced_by_own_counts() -> None:
    coordinator = FakeCoordinator(lambda route: None)
    first, second, client = await two_engines(coordinator)
    coordinator.is_up = False
    coordinator.on_message(Disconnected("killed"))
    for engine in (first, second):
        engine.hold.clear()
    for _ in range(20):
        await client.submit([replay()])
    counts = Counter({0: len(first.rows), 1: len(second.rows)})
    assert counts == {0: 10, 1: 10}
    assert client.num_fallbacks == 20


async def test_coordinator_lost_while_a_request_waits() -> None:
    coordinator = FakeCoordinator(lambda route: None)
    _, _, client = await two_engines(coordinator)
    submitting = asyncio.ensure_future(client.submit([replay()]))
    await asyncio.sleep(0.01)
    coordinator.is_up = False
    coordinator.on_message(Disconnected("killed"))
    assert ends(await drain(await submitting)) == [(0, "length", "")]


async def test_places_nobody_uses_are_returned() -> None:
    coordinator = FakeCoordinator(lambda route: None)
    _, _, client = await two_engines(coordinator)
    submitting = asyncio.ensure_future(client.submit([replay()]))
    await asyncio.sleep(0)
    (route,) = coordinator.log
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    coordinator.on_message(Routed(route.rid, 1, 0, 9))
    assert coordinator.log[-1] == Released(engine=1, epoch=0, count=1)


async def test_a_coordinator_that_knows_no_engine_yet_does_not_stop_us() -> None:
    coordinator = FakeCoordinator(lambda route: Routed(route.rid, -1, 0, 0, "no engine is ready"))
    first, second, client = await two_engines(coordinator, engine_wait_s=0.0)
    assert ends(await drain(await client.submit([replay()]))) == [(0, "length", "")]
    assert ends(await drain(await client.submit([replay()], pin=1))) == [(0, "length", "")]
    first.die("first")
    second.die("second")
    with pytest.raises(EngineDeadError, match="first"):
        await client.submit([replay()])


def view(*rows: int) -> View:
    members = []
    for engine, num in enumerate(rows):
        load = Load(engine, 0, 1, 0, 0, num, 0, 0, 0, 64, 0.0, {}, 0)
        members.append(Member(engine, 0, "ready", load))
    return View(1, members)


def test_first_burst_spreads_without_any_statistics() -> None:
    """O22, as a front end alone sees it."""
    fallback_router = FallbackRouter(random.Random(1))
    counts: Counter[int] = Counter()
    for _ in range(400):
        engine = fallback_router.choose([0, 1, 2, 3])
        fallback_router.started(engine)
        counts[engine] += 1
    assert all(80 <= counts[engine] <= 120 for engine in range(4))


def test_a_stale_view_neither_hides_nor_doubles_own_rows() -> None:
    fallback_router = FallbackRouter(random.Random(1))
    fallback_router.started(0, 3)
    fallback_router.on_view(view(5, 4))  # three of the five are ours
    assert (fallback_router.cost(0), fallback_router.cost(1)) == (5, 4)
    fallback_router.ended(0, 3)
    assert (fallback_router.cost(0), fallback_router.cost(1)) == (2, 4)
    fallback_router.started(1, 2)
    fallback_router.on_view(view(2, 4))  # taken before our two were seen
    assert fallback_router.cost(1) >= 4


def test_draining_engines_get_nothing_unless_nothing_else_is_up() -> None:
    fallback_router = FallbackRouter(random.Random(1))
    fallback_router.on_view(View(1, [Member(0, 0, "draining"), Member(1, 0, "ready")]))
    assert {fallback_router.choose([0, 1]) for _ in range(20)} == {1}
    assert fallback_router.choose([0]) == 0

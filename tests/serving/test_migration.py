"""Migration by replay at the engine client: what moves, what it costs, who is blamed, and how long anybody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.engines import FakeEngine, client_of, words
from tests.serving.test_client import drain, ends, replay
from trireme.errors import EngineDeadError
from trireme.params import RowParams
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.migration import judge
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Event, PromptLogprobs, Stream
from trireme.transport.wire.messages import First, StepOutputs, Submit


def continuing(text: str) -> dict[str, int] | object:
    """A script by absolute position: a replayed row goes on where it was."""
    return lambda submit: words(text)[submit.num_replayed :]


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    engines = (
        FakeEngine(continuing("abcdefghijklmnop"), index=0, step_s=0.002),  # type: ignore[arg-type]
        FakeEngine(continuing("abcdefghijklmnop"), index=1, step_s=0.002),  # type: ignore[arg-type]
    )
    yield engines
    for engine in engines:
        engine.stop()


def tokens_of(events: Sequence[Event], index: int = 0) -> list[int]:
    return [value for i, value in events if i == index and isinstance(value, int)]


def submits_of(engine: FakeEngine) -> list[Submit]:
    return [message for message in engine.log if isinstance(message, Submit)]


async def gained(stream: Stream, count: int) -> list[Event]:
    """Events of a stream until it has `count` tokens."""
    events: list[Event] = []
    while len([value for _, value in events if isinstance(value, int)]) < count:
        events += await stream.next()
    return events


async def ready(*engines: FakeEngine, **options: Any) -> EngineClient:
    client = client_of(*engines, **options)
    await client.wait_up(1)
    return client


async def test_a_dead_engines_rows_go_on_with_nothing_lost_or_repeated(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    one = replay(max_tokens=12, logprobs=1, prompt_logprobs=0)
    stream = await client.submit([one], pin=0)
    events = await gained(stream, 4)
    pair[0].die("killed")
    events += await drain(stream)
    assert tokens_of(events) == words("abcdefghijkl")
    assert ends(events) == [(0, "length", "")]
    assert len([value for _, value in events if isinstance(value, First)]) == 1
    scored = [value.rows for _, value in events if isinstance(value, PromptLogprobs)]
    assert np.concatenate([rows.token_ids[:, 0] for rows in scored]).tolist() == words("i")
    (again,) = submits_of(pair[1])
    assert again.prompt.tolist() == words("hi") + list(one.emitted)[: again.num_replayed]
    assert again.num_replayed >= 4
    assert again.num_moves == 1
    assert client.num_moved == 1
    assert client.num_choices == 0


async def test_a_row_that_moves_says_how_long_it_has_been_waiting(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """So that it keeps its place in time; a row that is sent for the first time has no age that a caller could make up."""
    now = 50.0
    client = await ready(*pair, clock=lambda: now)
    pair[0].hold.clear()
    streams = [await client.submit([replay()], pin=0)]
    now += 4.0
    streams.append(await client.submit([replay()], pin=0))
    now += 2.0
    pair[0].die("killed")
    streams.append(await client.submit([replay()], pin=1))
    for stream in streams:
        await drain(stream)
    assert [submit.waited_s for submit in submits_of(pair[0])] == [0.0, 0.0]
    assert sorted(submit.waited_s for submit in submits_of(pair[1])) == [0.0, 2.0, 6.0]


async def test_a_row_that_waits_for_an_engine_has_the_age_of_its_wait(pair: tuple[FakeEngine, FakeEngine]) -> None:
    now = 50.0
    client = await ready(pair[0], clock=lambda: now)
    pair[0].die()
    waiting = asyncio.ensure_future(client.submit([replay()]))
    await asyncio.sleep(0)
    now += 3.0
    pair[0].revive()
    await drain(await waiting)
    assert [submit.waited_s for submit in submits_of(pair[0])] == [3.0]


async def test_a_row_waits_for_an_engine_that_starts_again(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(pair[0])
    stream = await client.submit([replay(max_tokens=10)])
    events = await gained(stream, 2)
    pair[0].die()
    fresh = asyncio.ensure_future(client.submit([replay(max_tokens=3)]))
    await asyncio.sleep(0.05)
    assert not fresh.done()
    assert client.num_choices == 1
    assert client.capacity > 0
    pair[0].revive()
    events += await drain(stream)
    assert tokens_of(events) == words("abcdefghij")
    assert tokens_of(await drain(await fresh)) == words("abc")


async def test_the_wait_has_an_end(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(pair[0], engine_wait_s=0.1)
    stream = await client.submit([replay(max_tokens=10)])
    await gained(stream, 1)
    pair[0].die("out of memory")
    events = await drain(stream)
    assert ends(events) == [(0, "error", "engine_dead")]
    assert "out of memory" in events[-1][1].error  # type: ignore[union-attr]
    with pytest.raises(EngineDeadError, match="out of memory"):
        await client.submit([replay()])
    patient = replay()
    patient.deadline_s = 0.01
    begun = asyncio.get_running_loop().time()
    with pytest.raises(EngineDeadError):
        await client.submit([patient])
    assert asyncio.get_running_loop().time() - begun < 0.08


async def test_a_row_moves_only_so_often(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(pair[0])
    stream = await client.submit([replay(max_tokens=16)])
    for _ in range(3):
        await gained(stream, 2)
        pair[0].die("again")
        pair[0].revive()
    events = await drain(stream)
    assert ends(events) == [(0, "error", "engine_dead")]
    assert "after 2 resubmissions" in events[-1][1].error  # type: ignore[union-attr]


async def test_an_abort_between_two_engines(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(pair[0])
    stream = await client.submit([replay(choice=0), replay(choice=1)])
    pair[0].die()
    await asyncio.sleep(0)
    stream.abort(0)
    assert client.num_choices == 1
    stream.close()
    assert client.num_choices == 0
    pair[0].revive()
    await asyncio.sleep(0.01)
    assert len(submits_of(pair[0])) == 2


async def test_closing_ends_rows_between_engines(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(pair[0])
    stream = await client.submit([replay()])
    pair[0].die()
    client.close()
    assert ends(await drain(stream)) == [(0, "error", "engine_dead")]


async def test_rows_given_back_by_an_engine_go_where_they_are_told(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    pair[0].hold.clear()
    pair[1].hold.clear()
    stream = await client.submit([replay(max_tokens=4, choice=0), replay(max_tokens=4, choice=1)])
    source, target = pair if pair[0].rows else (pair[1], pair[0])
    source.reclaim(to=target.index)
    target.hold.set()
    events = await drain(stream)
    assert ends(events) == [(0, "length", ""), (1, "length", "")]
    assert tokens_of(events, 1) == words("abcd")
    assert [(submit.num_moves, submit.stays) for submit in submits_of(target)] == [(1, False)] * 2
    assert [row.num_moves for row in stream.replays] == [0, 0], "no engine died of them"


@pytest.mark.parametrize("to", [0, 1, 7])
async def test_rows_meant_for_an_engine_that_is_not_there_go_anywhere_at_once(
    pair: tuple[FakeEngine, FakeEngine], to: int
) -> None:
    client = await ready(*pair)
    pair[0].hold.clear()
    stream = await client.submit([replay(max_tokens=4)], pin=0)
    if to == 1:
        pair[1].die()
    pair[0].reclaim(to)
    pair[0].hold.set()
    assert ends(await asyncio.wait_for(drain(stream), 1)) == [(0, "length", "")]


async def test_what_was_waited_counts_against_the_deadline_and_pinned_rows_say_so(
    pair: tuple[FakeEngine, FakeEngine],
) -> None:
    client = await ready(*pair)
    pair[0].hold.clear()
    row = replay(max_tokens=4)
    row.deadline_s = 5.0
    stream = await client.submit([row], pin=0)
    assert submits_of(pair[0])[0].stays
    pair[0].reclaim(1, waited_s=3.0)
    await drain(stream)
    assert submits_of(pair[1])[0].deadline_s == pytest.approx(2.0)
    row.has_waited(99.0)
    assert row.deadline_s > 0, "0 would mean none"


async def test_a_row_aborted_before_it_is_given_back_stays_ended(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    pair[0].hold.clear()
    stream = await client.submit([replay(max_tokens=4)], pin=0)
    (rid,) = pair[0].rows
    stream.close()
    pair[0]._links[0].on_message(StepOutputs(0, 0, b"", b"", returned=[(rid, 1, 0.0)]))
    await asyncio.sleep(0.01)
    assert client.num_choices == 0
    assert not submits_of(pair[1])


# ---------------------------------------------------------------- poison


class Mortal(FakeEngine):
    """Dies of every row whose prompt has an "X", in the step that would compute it; says first who is placed."""

    def run_step(self) -> None:
        for link in self._links:
            placed = [row.submit.rid for row in self.rows.values() if row.num_done == 0]
            if placed and link.is_up:
                link.on_message(StepOutputs(self.index, self.step, b"", b"", placed=placed))
        if any(ord("X") in row.submit.prompt for row in self.rows.values()):
            self.die("a row was poison")
        else:
            super().run_step()


async def test_poison_ends_after_two_engines_and_its_mates_go_on() -> None:
    engines = [Mortal(continuing("abcdefghijklmnop"), index=i, step_s=0.002) for i in range(3)]  # type: ignore[arg-type]
    client = await ready(*engines)
    mates = [await client.submit([replay("mate", max_tokens=16, choice=i)], pin=0) for i in range(3)]
    heads = [await gained(mate, 1) for mate in mates]
    engines[0].hold.clear()
    late = await client.submit([replay("late", max_tokens=6)], pin=0)
    poison = await client.submit([replay("X", max_tokens=4)], pin=0)
    engines[0].hold.set()
    events = await asyncio.wait_for(drain(poison), 5)
    assert ends(events) == [(0, "error", "request_quarantined")]
    assert "poison" in events[-1][1].error  # type: ignore[union-attr]
    for head, mate in zip(heads, mates, strict=True):
        events = head + await asyncio.wait_for(drain(mate), 5)
        assert tokens_of(events) == words("abcdefghijklmnop")
    assert tokens_of(await asyncio.wait_for(drain(late), 5)) == words("abcdef")
    assert sum(not engine.is_up for engine in engines) == 2
    assert client.num_quarantined == 1
    for engine in engines:
        engine.stop()


@dataclass(eq=False)
class Sketch:
    """A row as `judge` sees it."""

    was_placed: bool = True
    has_gained: bool = False
    replay: Replay = field(default_factory=lambda: Replay(np.zeros(1, np.int32), RowParams(1)))


def suspect(**kw: bool) -> Sketch:
    row = Sketch(**kw)
    row.replay.is_suspect, row.replay.num_moves = True, 1
    return row


def test_several_suspects_that_die_together_are_tried_alone() -> None:
    rows = [suspect(), suspect(), Sketch(has_gained=True), Sketch(was_placed=False)]
    verdict = judge(rows, 2)
    assert verdict.poison == []
    assert verdict.free == rows[3:]
    assert verdict.probes == [[rows[2]], [rows[0]], [rows[1]]]


def test_a_death_that_is_explained_costs_the_others_nothing() -> None:
    poison, mate, queued = suspect(), Sketch(has_gained=True), Sketch(was_placed=False)
    verdict = judge([poison, mate, queued], 0)
    assert verdict == ([poison], [], [queued], [[mate]])
    assert mate.replay.is_suspect
    assert not queued.replay.is_suspect


def test_a_lost_connection_to_an_engine_that_lives_makes_no_suspects_and_finds_no_guilty() -> None:
    running, accused, queued = Sketch(has_gained=True), suspect(), Sketch(was_placed=False)
    verdict = judge([running, accused, queued], 2, is_death=False)
    assert verdict == ([], [], [running, queued], [[accused]])
    assert not running.replay.is_suspect
    assert accused.replay.is_suspect
    assert [row.replay.num_moves for row in (running, accused, queued)] == [1, 2, 1]
    assert judge([running], 1, is_death=False).exhausted == [running]


def test_a_suspect_that_was_still_queued_is_not_guilty_and_stays_apart() -> None:
    row = suspect(was_placed=False)
    assert judge([row], 9) == ([], [], [], [[row]])


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=8), st.integers(0, 3)
)
def test_every_row_has_exactly_one_fate(shapes: list[tuple[bool, bool, bool, int]], limit: int) -> None:
    rows = []
    for placed, has_gained, is_suspect, num_moves in shapes:
        row = Sketch(was_placed=placed, has_gained=placed and has_gained)
        row.replay.is_suspect, row.replay.num_moves = is_suspect and not row.has_gained, num_moves
        rows.append(row)
    before = [row.replay.num_moves for row in rows]
    verdict = judge(rows, limit)
    fates = [*verdict.poison, *verdict.exhausted, *verdict.free, *(row for probe in verdict.probes for row in probe)]
    assert sorted(map(id, fates)) == sorted(map(id, rows))
    assert len(verdict.poison) <= 1
    for row, moves in zip(rows, before, strict=True):
        assert row.replay.num_moves == moves + (not verdict.poison)
        assert (row in verdict.exhausted) == (row not in verdict.poison and row.replay.num_moves > limit)
    assert all(row.has_gained for row in verdict.probes[0]) or len(verdict.probes[0]) == 1 if verdict.probes else True


class Grammar:
    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def restart(self, emitted: Sequence[int]) -> None:
        self.seen.append(list(emitted))


def test_what_follows_the_output_is_led_over_it_again_after_a_move() -> None:
    one, grammar = replay(), Grammar()
    one.cursor = grammar
    one.submit(1)
    one.emitted.extend([5, 6])
    one.submit(2)
    assert grammar.seen == [[5, 6]]

"""Engines in lock step at the engine client: none works without the others, and the death of one is that of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.serving.engines import FakeEngine, client_of, words
from tests.serving.test_client import drain, ends, replay
from tests.serving.test_migration import continuing, gained, submits_of, tokens_of
from trireme.errors import EngineDeadError
from trireme.serving.engines.client import EngineClient
from trireme.transport.wire.messages import Welcome

TEXT = "abcdefghijklmnop"


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeEngine, FakeEngine]]:
    first, second = (FakeEngine(continuing(TEXT), index=i, step_s=0.002) for i in range(2))  # type: ignore[arg-type]
    yield first, second
    first.stop()
    second.stop()


async def ready(*engines: FakeEngine) -> EngineClient:
    client = client_of(*engines, in_lockstep=True)
    await client.wait_up(1)
    return client


async def test_all_rows_go_on_when_one_engine_dies_and_all_are_back(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    streams = [await client.submit([replay(max_tokens=12)], pin=i) for i in range(2)]
    events = [await gained(stream, 3) for stream in streams]
    pair[0].die("killed")
    assert [state.is_up for state in client.states()] == [False, False]
    assert client.states()[1].reason == "it steps together with engine 0, which is down: killed"
    (lost,) = submits_of(pair[1])
    assert pair[1].aborted == [lost.rid]
    pair[0].revive()
    await asyncio.sleep(0.02)
    assert [state.is_up for state in client.states()] == [False, False]  # the other one is of the life before
    pair[1].die()
    pair[1].revive()
    found = [[*before, *await drain(stream)] for before, stream in zip(events, streams, strict=True)]
    assert [tokens_of(one) for one in found] == [words(TEXT[:12])] * 2
    assert client.num_moved == 2  # one death, not two
    assert client.num_choices == 0


async def test_a_link_that_breaks_and_comes_back_in_the_same_life(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    pair[0].die()
    pair[0].is_up = True
    for link in pair[0]._links:
        link.is_up = True
        link.on_message(Welcome(1, b"", "engine", "engine-0", 0, 1, pair[0].facts))
    assert [state.is_up for state in client.states()] == [True, True]
    stream = await client.submit([replay(max_tokens=4)], pin=1)
    events = await drain(stream)
    assert tokens_of(events) == words(TEXT[:4])
    assert ends(events) == [(0, "length", "")]


async def test_a_torn_connection_is_nobodys_death(pair: tuple[FakeEngine, FakeEngine]) -> None:
    """Rows that came over it go on; those of the other engine are not touched, for it has not ended."""
    client = await ready(*pair)
    streams = [await client.submit([replay(max_tokens=12)], pin=i) for i in range(2)]
    events = [await gained(stream, 3) for stream in streams]
    pair[0].tear()
    assert [state.is_up for state in client.states()] == [True, True]
    found = [[*before, *await drain(stream)] for before, stream in zip(events, streams, strict=True)]
    assert [tokens_of(one) for one in found] == [words(TEXT[:12])] * 2
    assert client.num_moved == 1
    assert pair[1].aborted == []
    assert not any(row.is_suspect for stream in streams for row in stream.replays)
    assert client.num_choices == 0


async def test_a_silent_engine_stalls_all(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    pair[1].silent_s = 3.0
    assert [state.stalled for state in client.states()] == [
        "engine 1: its loop has not answered for 3.0 s",
        "its loop has not answered for 3.0 s",
    ]


async def test_calls_to_the_living_one_are_not_cut(pair: tuple[FakeEngine, FakeEngine]) -> None:
    client = await ready(*pair)
    admission_fields = [asyncio.ensure_future(client.call(i, "stats")) for i in range(2)]
    await asyncio.sleep(0)
    pair[0].die("killed")
    found = await asyncio.gather(*admission_fields, return_exceptions=True)
    assert isinstance(found[0], EngineDeadError)
    assert isinstance(found[1], dict)

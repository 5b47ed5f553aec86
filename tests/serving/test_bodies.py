"""Bodies that arrive slowly, or not at all, keep nobody out and nothing from ending."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.errors import OverloadedError
from trireme.serving.front import SPARE_REQUESTS
from trireme.serving.http.bodies import STALLED_S, Bodies
from trireme.serving.main import drain

TEXT = {"model": "stub", "prompt": "hello"}
CAPACITY = 4


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bytes_are_counted_until_a_body_has_become_tokens() -> None:
    bodies = Bodies(100, small=0, clock=Clock())
    first, second = bodies.begin(b"a"), bodies.begin(b"b")
    bodies.take(first, 60)
    bodies.take(second, 40)
    first.is_whole = True
    with pytest.raises(OverloadedError, match="100 bytes"):
        bodies.take(second, 1)
    bodies.end(first)
    bodies.end(first)
    bodies.take(second, 1)
    assert (bodies.num_bytes, len(bodies)) == (41, 1)
    bodies.end(second)
    assert (bodies.num_bytes, len(bodies)) == (0, 0)


def test_the_memory_of_what_stands_still_goes_to_those_that_come() -> None:
    """Of the caller that has most, and there of the body that stands still longest."""
    clock = Clock()
    bodies = Bodies(100, small=0, clock=clock)
    stopped: list[str] = []
    one = {}
    for name, caller, size in (("a1", b"a", 30), ("a2", b"a", 20), ("b1", b"b", 40)):
        body = one[name] = bodies.begin(caller)
        body.stop = lambda name=name: stopped.append(name)
        bodies.take(body, size)
        clock.now += 0.1
    new = bodies.begin(b"c")
    with pytest.raises(OverloadedError):
        bodies.take(new, 40)  # nothing has stood still for long
    clock.now = STALLED_S + 0.25
    bodies.take(one["a1"], 1)
    bodies.take(new, 40)
    assert stopped == ["a2", "b1"]  # a1 moves; a had most, then b of those that stand still
    assert isinstance(one["a2"].refusal, OverloadedError)
    assert bodies.num_bytes == 71


def test_a_body_that_is_whole_is_nobody_elses_room() -> None:
    clock = Clock()
    bodies = Bodies(100, small=0, clock=clock)
    whole = bodies.begin(b"a")
    bodies.take(whole, 90)
    whole.is_whole = True
    clock.now += 100
    with pytest.raises(OverloadedError):
        bodies.take(bodies.begin(b"b"), 20)
    bodies.refuse_all(OverloadedError("over"))
    assert whole.refusal is None


def test_the_number_of_bodies_is_bounded_for_those_that_stand_still() -> None:
    clock = Clock()
    bodies = Bodies(100, most=3, small=0, clock=clock)
    held = [bodies.begin(caller) for caller in (b"a", b"b", b"b")]
    with pytest.raises(OverloadedError, match="3 bodies"):
        bodies.begin(b"c")
    clock.now += STALLED_S
    bodies.begin(b"c")
    assert [body.refusal is not None for body in held] == [False, True, False]


def test_a_few_large_bodies_keep_no_small_one_out() -> None:
    bodies = Bodies(100, small=10, clock=Clock())
    large, small, other = (bodies.begin(b"a") for _ in range(3))
    bodies.take(large, 100)
    large.is_whole = True
    bodies.take(small, 4)
    bodies.take(small, 6)
    with pytest.raises(OverloadedError):
        bodies.take(small, 1)
    with pytest.raises(OverloadedError):
        bodies.take(other, 11)
    assert bodies.num_bytes == 110


@contextlib.asynccontextmanager
async def half_sent(served: Served, count: int, size: int = 1) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that have sent a head and so many bytes of a longer body."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    opened = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(count)]
    for _, writer in opened:
        writer.write(head + b"{" + b" " * (size - 1))
    async with asyncio.timeout(10):
        while len(served.front.bodies) < count or served.front.bodies.num_bytes < count * size:
            await asyncio.sleep(0.005)
    yield [reader for reader, _ in opened]
    for _, writer in opened:
        writer.close()


async def test_half_sent_bodies_close_the_door_to_nobody(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS), max_num_seqs=CAPACITY // 2, max_waiting=CAPACITY // 2)
    async with serve(tmp_path, engine) as served:
        assert served.front.client.capacity == CAPACITY
        async with half_sent(served, CAPACITY + SPARE_REQUESTS + 16):
            assert served.front.num_inside == 0
            for _ in range(3):
                assert (await served.post("/v1/completions", TEXT))[0] == 200
        async with asyncio.timeout(5):
            while len(served.front.bodies):
                await asyncio.sleep(0.005)


async def test_bodies_that_stopped_give_their_memory_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.front.MIN_BODY_BUDGET", 0)
    monkeypatch.setattr("trireme.serving.http.bodies.STALLED_S", 0.05)
    monkeypatch.setattr("trireme.serving.front.Bodies", functools.partial(Bodies, small=0))
    async with (
        serve(tmp_path, FakeEngine(words("x", EOS)), body_limit=5000) as served,
        half_sent(served, 4, 4900) as readers,
    ):
        await asyncio.sleep(0.1)
        assert (await served.post("/v1/completions", {**TEXT, "user": "u" * 100, "prompt": "x" * 1000}))[0] == 200
        head = await asyncio.wait_for(readers[0].readuntil(b"\r\n\r\n"), 5)
        assert b" 503 " in head.splitlines()[0]
        size = next(int(line.split(b":")[1]) for line in head.splitlines() if line.startswith(b"content-length"))
        answer = json.loads(await readers[0].readexactly(size))
        assert "has not moved" in answer["error"]["message"]
        assert len(served.front.bodies) == 3


async def test_long_texts_delay_no_shorter_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    async with serve(tmp_path, FakeEngine(words("x", EOS), max_len=1_000_000)) as served:
        encode = served.front.tokenizer.encode

        def slow(text: str, **options: bool) -> np.ndarray:
            if len(text) > 100_000:
                let_go.wait(20)
            return encode(text, **options)

        monkeypatch.setattr(served.front.tokenizer, "encode", slow)
        long = [asyncio.ensure_future(served.post("/tokenize", {"prompt": "x" * 400_000})) for _ in range(4)]
        try:
            async with asyncio.timeout(5):
                while served.front.num_inside < 4:
                    await asyncio.sleep(0.005)
                status, answer = await served.post("/tokenize", {"prompt": "x" * 50_000})
            assert (status, answer["count"]) == (200, 50_000)
            assert not any(one.done() for one in long)
        finally:
            let_go.set()
        assert [(await one)[1]["count"] for one in long] == [400_000] * 4


async def test_a_drain_does_not_wait_for_half_a_body(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served, half_sent(served, 2) as readers:
        start = time.monotonic()
        await drain(served.front, served.listener, notice_s=0.2, deadline_s=20)
        assert time.monotonic() - start < 5
        for reader in readers:
            answer = await reader.read()
            assert b" 503 " in answer.splitlines()[0]
            assert b"shutting down" in answer

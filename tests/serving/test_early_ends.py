"""Streams that end before their answer does: readers that are too slow, and failures in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any, Literal

import openai
import pytest

import trireme.serving.engines.client
from tests.models.tiny import EOS, make_stub
from tests.serving.deployment import Served, serve, serve_model
from tests.serving.engines import FakeEngine, words
from trireme.serving.api.openai.completions import CompletionFormat
from trireme.serving.app import make_app
from trireme.serving.http.sse import EventStream

TEXT = {"model": "stub", "prompt": "hello"}
OUTCOMES = ("complete", "error", "cancelled")


async def test_a_reader_that_stops_is_reset_and_frees_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.http.sse.STALL_S", 0.5)
    monkeypatch.setattr("trireme.serving.http.sse.TAKE_S", 1.0)
    engine = FakeEngine([259] * 100_000, step_s=0.0005, max_len=200_000)
    async with serve(tmp_path, engine, extra=["long text " * 100], stream_buffer=4096) as served:
        body = json.dumps({**TEXT, "stream": True, "max_tokens": 100_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.write(head + body)
        await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        try:
            async with asyncio.timeout(15):
                while served.front.client.num_choices == 0 and not engine.aborted:
                    await asyncio.sleep(0.01)
                while served.front.client.num_choices or not engine.aborted:
                    await asyncio.sleep(0.05)  # the abort travels to the engine by itself
            await served.quiet()
        finally:
            writer.transport.abort()
        assert engine.aborted == [1]
        numbers = await served.numbers()
        assert numbers["trireme_slow_readers_total"] == 1
        assert numbers["trireme_slow_readers_reset_total"] == 1
        assert numbers['trireme_requests_total{outcome="error"}'] == 1


Leave = Literal["after the head", "after the last token", "at the end", "cancelled"]


async def ask_and_leave(app: Any, body: dict[str, Any], leave: Leave, num_events: int) -> None:
    """One request without a server around it, whose client leaves at a moment that a socket would hardly hit."""
    gone = asyncio.Event()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if not asked:
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal num_events
        is_head = message["type"] == "http.response.start"
        num_events -= message.get("body", b"").count(b"data: {")
        is_last = not is_head and not message["more_body"]
        moments = {
            "after the head": is_head,
            "after the last token": num_events <= 0 and not is_head,
            "at the end": is_last,
        }
        if moments.get(leave):
            gone.set()
        for _ in range(3):
            await asyncio.sleep(0)  # a slow connection: whoever waits for the client hears of it

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "headers": headers,
    }
    scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "http_version": "1.1", "extensions": {}}
    task = asyncio.ensure_future(app(scope, receive, send))
    if leave == "cancelled":
        await asyncio.sleep(0.05)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("is_stream", "leave", "outcome"),
    [
        (False, "after the head", "cancelled"),
        (False, "at the end", "cancelled"),
        (False, "cancelled", "cancelled"),
        (True, "after the head", "cancelled"),
        (True, "after the last token", "cancelled"),
        (True, "at the end", "complete"),  # everything was written by then
        (True, "cancelled", "cancelled"),
    ],
)
async def test_who_has_left_is_counted_as_such(tmp_path: Path, is_stream: bool, leave: Leave, outcome: str) -> None:
    engine = FakeEngine(words("abc", EOS), step_s=0.03)
    async with serve(tmp_path, engine) as served:
        await ask_and_leave(make_app(served.front), {**TEXT, "stream": is_stream}, leave, num_events=4)
        await served.quiet()
        numbers = await served.numbers()
        found = {name: numbers.get(f'trireme_requests_total{{outcome="{name}"}}', 0.0) for name in OUTCOMES}
        assert found == {name: float(name == outcome) for name in OUTCOMES}


async def test_a_steady_slow_reader_ends_with_an_error_event(tmp_path: Path) -> None:
    """It takes 64 KiB a second from an engine that writes more than ten times that: whole events, then why there are no more."""
    engine = FakeEngine([259] * 100_000, step_s=0.001, max_len=200_000)
    async with serve(tmp_path, engine, extra=["long text " * 100], stream_buffer=16384) as served:
        body = json.dumps({**TEXT, "stream": True, "max_tokens": 100_000}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        loop = asyncio.get_running_loop()
        answer = b""
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", served.port))
            await loop.sock_sendall(one, head + body)
            async with asyncio.timeout(45):
                while piece := await loop.sock_recv(one, 3277):
                    answer += piece
                    await asyncio.sleep(0.05)
        events = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
        parsed = [json.loads(event[6:]) for event in events]
        assert all("choices" in event for event in parsed[:-1])
        error = parsed[-1]["error"]
        assert (error["code"], error["type"]) == ("slow_reader", "timeout_error")
        assert "--stream-buffer" in error["message"]
        async with asyncio.timeout(5):
            while not engine.aborted:
                await asyncio.sleep(0.01)
        await served.quiet()
        numbers = await served.numbers()
        assert numbers["trireme_slow_readers_total"] == 1
        assert numbers["trireme_slow_readers_reset_total"] == 0
        assert numbers['trireme_requests_total{outcome="error"}'] == 1


@pytest.mark.parametrize("fields", [{}, {"logprobs": 5}], ids=["text", "logprobs"])
async def test_what_waits_for_a_slow_reader_is_counted_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """The reader stops while its events are written and more come; then it reads all, and what it had not been given is known."""
    given = 0
    write = EventStream._write

    async def counted(self: EventStream, data: bytes) -> None:
        nonlocal given
        await write(self, data)
        given += len(data)

    monkeypatch.setattr(EventStream, "_write", counted)
    engine = FakeEngine(words("a" * 3000, EOS), max_len=4000)
    async with serve(tmp_path, engine, stream_buffer=1 << 30) as served:
        body = json.dumps({**TEXT, "stream": True, "max_tokens": 3000, **fields}).encode()
        head = b"POST /v1/completions HTTP/1.0\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            one.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(one, ("127.0.0.1", served.port))
            await loop.sock_sendall(one, head + body)
            async with asyncio.timeout(30):
                while served.front.client.num_choices or not served.front.ticker.streams:
                    await asyncio.sleep(0.02)  # until the engine has said all
                (stream,) = served.front.ticker.streams
                lag, before = stream.lag(), given
                answer = b""
                while piece := await loop.sock_recv(one, 1 << 20):
                    answer += piece
        text = answer.partition(b"\r\n\r\n")[2].removesuffix(b"data: [DONE]\n\n")
        waited = len(text) - before
        assert waited > 200_000
        assert waited * 0.9 < lag < waited * 1.1


async def read_slowly(served: Served, stops: bool) -> None:
    """With OpenAI's client, which reads as fast as its user takes events."""
    stream = await served.openai.completions.create(**TEXT, stream=True, max_tokens=100_000)
    got = 0
    async for _ in stream:
        got += 1
        await asyncio.sleep(0 if stops else 0.002)
        if stops and got == 10:
            async with asyncio.timeout(20):
                while served.front.num_inside:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("stops", [False, True])
async def test_what_the_official_client_says_to_a_slow_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Its user meets the reason while the connection takes it, and after a reset an error without one."""
    monkeypatch.setattr("trireme.serving.http.sse.TAKE_S", 1.0)
    engine = FakeEngine([259] * 200_000, step_s=0.0002, max_len=400_000)
    async with serve(tmp_path, engine, extra=["long text " * 1000], stream_buffer=16384) as served:
        with pytest.raises(openai.APIConnectionError if stops else openai.APIError) as raised:
            async with asyncio.timeout(45):
                await read_slowly(served, stops)
        if not stops:
            assert isinstance(raised.value.body, dict)
            assert raised.value.body["code"] == "slow_reader"
        await served.quiet()


@pytest.mark.parametrize("kind", [MemoryError, ValueError])
async def test_what_fails_inside_an_open_stream_ends_it_with_an_error_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """As when this process has no memory left: fixed words, and no end marker."""
    engine = FakeEngine(words("a" * 100, EOS), step_s=0.003)
    async with serve(tmp_path, engine) as served:
        event, calls = CompletionFormat.event, 0

        def failing(*args: Any) -> bytes:
            nonlocal calls
            calls += 1
            if calls > 5:
                raise kind("details for the log only")
            return event(*args)

        monkeypatch.setattr(CompletionFormat, "event", failing)
        events = await served.events("/v1/completions", {**TEXT, "max_tokens": 100})
        assert [list(one) for one in events[-1:]] == [["error"]]
        assert events[-1]["error"]["code"] == "internal_error"
        assert "details" not in events[-1]["error"]["message"]
        assert len(events) > 1
        await served.quiet()
        assert (await served.numbers())['trireme_requests_total{outcome="error"}'] == 1


async def test_what_an_engine_said_and_nobody_took_in_ends_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would go on without those tokens, as if nothing had happened."""
    model = make_stub(tmp_path / "m", scripts=[["a" * 200]], delay_ms=3)
    async with serve_model(model, worker="fake") as served:
        calls, unpack = 0, trireme.serving.engines.client.unpack

        def failing(column: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 20:
                raise MemoryError
            return unpack(column)

        monkeypatch.setattr(trireme.serving.engines.client, "unpack", failing)
        streams = [served.events("/v1/completions", {**TEXT, "max_tokens": 100}) for _ in range(3)]
        for events in await asyncio.gather(*streams):
            assert events[-1]["error"]["code"] == "engine_error"
            assert "[DONE]" not in events
        await served.quiet()
        await served.freed()
        whole = await served.events("/v1/completions", {**TEXT, "max_tokens": 100})
        assert whole[-1] == "[DONE]"

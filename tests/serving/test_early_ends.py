"""Streams that end before their answer does: readers that are too slow, and failures in the middle."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest

import trireme.serving.engines.client
from tests.models.tiny import EOS, make_stub
from tests.serving.deployment import Served, serve, serve_model
from tests.serving.engines import FakeEngine, words
from trireme.serving.api.openai.completions import CompletionFormat

TEXT = {"model": "stub", "prompt": "hello"}


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
                while served.front.client.num_rows == 0 and not engine.aborted:
                    await asyncio.sleep(0.01)
                while served.front.client.num_rows or not engine.aborted:
                    await asyncio.sleep(0.05)  # the abort travels to the engine by itself
            await served.quiet()
        finally:
            writer.transport.abort()
        assert engine.aborted == [1]
        numbers = await served.numbers()
        assert numbers["trireme_slow_readers_total"] == 1
        assert numbers["trireme_slow_readers_reset_total"] == 1
        assert numbers['trireme_requests_total{outcome="error"}'] == 1


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
                    if b'"error"' in answer[-8192:] and answer.endswith(b"0\r\n\r\n"):
                        break
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

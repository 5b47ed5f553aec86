"""What comes on one connection: requests and garbage in one packet, HTTP/1.0, and requests that do not say for which host."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.serving.http import listener

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
GARBAGE = b"\x16\x03\x01 nothing\r\n\r\n"


def completion(stream: bool, length_off: int = 0, max_tokens: int = 3) -> bytes:
    body = json.dumps({"model": "stub", "prompt": "hello", "max_tokens": max_tokens, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % (len(body) + length_off) + body


async def said(served: Served, *packets: bytes, pause_s: float = 0.0) -> bytes:
    """Everything that comes back on one connection until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(pause_s)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged as an error."""
    caplog.set_level(logging.ERROR)
    return caplog.records


async def test_garbage_behind_a_request_does_not_take_its_answer(
    tmp_path: Path, errors: list[logging.LogRecord]
) -> None:
    async with serve(tmp_path, FakeEngine(words("abc", EOS), step_s=0.02)) as served:
        assert statuses(await said(served, HEALTH + GARBAGE)) == [200, 400]
        assert statuses(await said(served, HEALTH * 3 + GARBAGE)) == [200, 200, 200, 400]
        whole = await said(served, completion(stream=False) + GARBAGE)
        assert statuses(whole) == [200, 400]
        assert b'"text":"abc"' in whole
        stream = await said(served, completion(stream=True) + GARBAGE)
        assert statuses(stream) == [200, 400]
        assert stream.index(b"data: [DONE]") < stream.index(b"not a valid HTTP request")
        both = await said(served, completion(stream=True) + completion(stream=True) + GARBAGE)
        assert (statuses(both), both.count(b"data: [DONE]")) == ([200, 200, 400], 2)
        await served.quiet()
    assert errors == []


async def test_garbage_that_comes_while_a_stream_runs_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, errors: list[logging.LogRecord]
) -> None:
    """Neither the refusal nor the time it leaves for reading it ends the stream early."""
    monkeypatch.setattr(listener, "LINGER_S", 0.1)
    monkeypatch.setattr(listener, "HEADER_TIMEOUT_S", 0.1)
    async with serve(tmp_path, FakeEngine(words("a" * 20, EOS), step_s=0.03)) as served:
        for late in (GARBAGE, b"GET /health HTTP/1.1\r\nx: " + b"y" * 20_000, b"GET /health HTTP/1.1\r\nhos"):
            answer = await said(served, completion(stream=True, max_tokens=20), late, GARBAGE, pause_s=0.05)
            assert answer.count(b'"text":"a"') == 20
            assert answer.index(b"data: [DONE]") < answer.rindex(b"HTTP/1.1 4")
        await served.quiet()
    assert errors == []


async def test_a_body_that_goes_wrong_is_one_400(tmp_path: Path, errors: list[logging.LogRecord]) -> None:
    async with serve(tmp_path, FakeEngine(words("abc", EOS))) as served:
        shorter = await said(served, completion(stream=False, length_off=-5))
        assert statuses(shorter) == [400, 400]  # JSON that is cut off, and what is left of it
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        broken = head + b"5\r\nhello\r\nnothing\r\n"
        assert statuses(await said(served, broken)) == [400]
        assert statuses(await said(served, HEALTH + broken)) == [200, 400]
        assert statuses(await said(served, completion(stream=True) + HEALTH + broken)) == [200, 200, 400]
        await served.quiet()
    assert errors == []


async def test_a_flood_behind_a_request_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "LINGER_BYTES", 1000)
    engine = FakeEngine(words("a" * 500), step_s=0.05)
    async with serve(tmp_path, engine) as served:
        answer = await said(served, completion(stream=True, max_tokens=500), GARBAGE, b"x" * 2000, pause_s=0.1)
        assert b'"text":"a"' in answer
        assert b"[DONE]" not in answer
        await served.quiet()
        assert engine.rows == {}


async def test_http_1_0_gets_its_streams_as_they_are(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("abc", EOS), step_s=0.01)) as served:
        request = completion(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0")
        head, _, body = (await said(served, request)).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()
        events = body.decode().split("\n\n")
        assert all(event.startswith("data: ") for event in events[:-1])
        assert events[-2:] == ["data: [DONE]", ""]
        assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == "abc"
        head, _, body = (await said(served, HEALTH.replace(b"1.1", b"1.0"))).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body) == {"status": "alive"}


async def test_a_request_names_one_host(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        for head, expected in (
            (b"GET /health HTTP/1.1\r\n\r\n", [400]),
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\nHost: evil.example\r\n\r\n", [400]),
            (b"GET /health HTTP/1.0\r\nhost: localhost\r\nHost: evil.example\r\n\r\n", [400]),
            (b"GET /health HTTP/1.0\r\n\r\n", [200]),
            (HEALTH + b"GET /health HTTP/1.1\r\n\r\n" + HEALTH, [200, 400]),
        ):
            answer = await said(served, head)
            assert statuses(answer) == expected, head
            assert expected == [200] or b"Host header" in answer

"""Who may come in and how much they may send: keys, hosts, header and body limits, slow and silent clients, draining."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.serving.http.bodies import Bodies
from trireme.serving.http.middleware import PUBLIC, ApiKeys
from trireme.serving.main import drain

TEXT = {"model": "stub", "prompt": "hello"}
ROUTES = ["/v1/models", "/v1/models/stub", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
TRICKS = [
    "/metrics",
    "/",
    "/health/",
    "/health/../v1/models",
    "//health",
    "/HEALTH",
    "/health%2f",
    "/health;/v1/models",
]


async def test_only_listed_routes_answer_without_a_key(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS)), api_key=("secret", "other")) as served:
        for path in (*ROUTES, *TRICKS):
            for method in ("GET", "POST", "OPTIONS", "PUT"):
                status, headers, body = await served.request(method, path)
                assert status == 401, path
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
                assert headers["www-authenticate"] == "Bearer"
        for path in PUBLIC:
            assert (await served.request("GET", path))[0] == 200
        for key, expected in (("secret", 200), ("other", 200), ("secre", 401), ("secrets", 401), ("", 401)):
            for name, value in (("authorization", f"Bearer {key}"), ("x-api-key", key)):
                assert (await served.request("GET", "/v1/models", headers={name: value}))[0] == expected
        wrong_scheme = {"authorization": "Basic secret"}
        assert (await served.request("GET", "/v1/models", headers=wrong_scheme))[0] == 401


def test_keys_are_not_kept_in_the_clear() -> None:
    keys = ApiKeys(["top-secret"])
    assert "top-secret" not in repr(vars(keys))
    assert keys.find([(b"authorization", b"bearer top-secret")])
    assert not ApiKeys([])
    assert not ApiKeys([""])
    assert ApiKeys(["", "known"]).find([]) is None


@pytest.mark.parametrize("part", [slice(0, 2), slice(-2, None), slice(15, 17)])
def test_a_key_whose_digest_is_alike_in_parts_is_none(part: slice) -> None:
    """All of the digest counts: keys that share two bytes of it are found in a moment."""
    keys, wanted = ApiKeys(["top-secret"]), hashlib.sha256(b"top-secret").digest()[part]
    tried = (f"guess-{i}".encode() for i in range(1 << 22))
    alike = next(key for key in tried if hashlib.sha256(key).digest()[part] == wanted)
    assert keys.find([(b"authorization", b"Bearer " + alike)]) is None


async def test_hostnames_of_strangers_are_refused_on_loopback(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        for host, expected in (
            ("localhost:8000", 200),
            ("127.0.0.1", 200),
            ("[::1]:80", 200),
            ("a.localhost", 200),
            ("evil.example", 403),
            ("127.0.0.1.evil.example", 403),
            ("localhost.evil.example:80", 403),
        ):
            assert (await served.request("GET", "/v1/models", headers={"host": host}))[0] == expected, host
        assert (await served.request("GET", "/health", headers={"host": "probe.example"}))[0] == 200
        for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
            head = "GET /v1/models HTTP/1.1\r\nconnection: close\r\n" + "".join(f"host: {host}\r\n" for host in hosts)
            assert (await served.send(head.encode() + b"\r\n"))[0] in (400, 403), hosts


async def test_unknown_routes_and_methods(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        for method, path, expected in (
            ("GET", "/nothing", 404),
            ("POST", "/v1/models", 405),
            ("GET", "/v1/completions", 405),
            ("GET", "/v1/completions/", 404),
            ("HEAD", "/health", 200),
        ):
            status, headers, body = await served.request(method, path)
            assert status == expected, path
            assert headers["content-type"] == "application/json"
            assert method == "HEAD" or expected == 200 or json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_request_ids_are_echoed(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        _, headers, body = await served.request("POST", "/v1/completions", TEXT, {"x-request-id": "abc-1"})
        assert headers["x-request-id"] == "abc-1"
        assert json.loads(body)["id"] == "cmpl-abc-1"
        for bad in ("x" * 129, "a b", "\u00e9"):
            status, headers, _ = await served.request("GET", "/health", headers={"x-request-id": bad})
            assert status == 200
            assert len(headers["x-request-id"]) == 32
        _, headers, _ = await served.request("GET", "/nothing")
        assert len(headers["x-request-id"]) == 32


async def test_bodies_are_limited_while_they_are_read(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(), body_limit=4096) as served:
        status, _, body = await served.request("POST", "/v1/completions", raw=b"x" * 4097)
        assert status == 413
        assert "4096" in json.loads(body)["error"]["message"]
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n"
        assert (await served.send(head + chunk * 5))[0] == 413
        assert (await served.request("POST", "/v1/completions", {"prompt": "x"}, {"content-encoding": "gzip"}))[
            0
        ] == 415
        assert (await served.request("POST", "/v1/completions", raw=b"a=b", headers={"content-type": "text/plain"}))[
            0
        ] == 415
        assert (await served.request("POST", "/tokenize", raw=b'{"prompt": "x"}'))[0] == 200


async def test_all_bodies_together_have_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.front.MIN_BODY_BUDGET", 0)
    monkeypatch.setattr("trireme.serving.front.Bodies", functools.partial(Bodies, small=0))
    async with serve(tmp_path, FakeEngine(), body_limit=4096) as served:
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n\r\n"
        slow = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head + b" " * 3999)
            slow.append(writer)
        while served.front.bodies.num_bytes < 4 * 3999:
            await asyncio.sleep(0.005)
        assert (await served.request("POST", "/tokenize", raw=b" " * 1000))[0] == 503
        for writer in slow:
            writer.close()
        while served.front.bodies.num_bytes:
            await asyncio.sleep(0.005)
        assert (await served.request("POST", "/tokenize", {"prompt": "x" * 1000}))[0] == 200


async def test_headers_are_limited(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        assert (await served.request("GET", "/health", headers={"x": "y" * 20_000}))[0] == 431
        assert (await served.request("GET", "/health", headers={f"x-{i}": "y" for i in range(101)}))[0] == 431
        assert (await served.request("GET", "/health?" + "q" * 17_000))[0] == 431
        assert (await served.send(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 1_000_000))[0] == 431
        assert (await served.request("GET", "/health", headers={"x": "y" * 10_000}))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_broken_http_is_a_400(tmp_path: Path, data: bytes) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        status, headers, body = await served.send(data)
        assert status == 400
        assert headers["connection"] == "close"
        assert "error" in json.loads(body)
        assert (await served.request("GET", "/health"))[0] == 200


async def test_late_heads_and_bodies_are_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.http.listener.HEADER_TIMEOUT_S", 0.1)
    monkeypatch.setattr("trireme.serving.http.bodies.BODY_TIMEOUT_S", 0.1)
    async with serve(tmp_path, FakeEngine()) as served:
        assert (await served.send(b"GET /health HTTP/1.1\r\nhost: "))[0] == 408
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 50\r\n\r\n"
        assert (await served.send(head + b'{"prompt"'))[0] == 408
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""  # silent from the start: closed without a word
        writer.close()


async def test_connections_are_limited(tmp_path: Path) -> None:
    """Those over the limit are told so in the API's own words, and those inside are served as before."""
    async with serve(tmp_path, FakeEngine(), max_connections=2) as served:
        inside = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(2)]
        status, headers, body = await served.request("GET", "/health")
        assert (status, headers["retry-after"]) == (503, "1")
        assert json.loads(body)["error"]["message"] == "2 connections are open, the limit"
        for reader, writer in inside:
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()
            await writer.wait_closed()
        async with asyncio.timeout(5):
            while (await served.request("GET", "/health"))[0] != 200:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("connection", [b"keep-alive", b"close"])
async def test_answers_that_nobody_reads_hold_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: bytes
) -> None:
    """Of any route: here of one that has no stream to watch."""
    monkeypatch.setattr("trireme.serving.http.listener.UNREAD_S", 0.2)
    async with serve(tmp_path, FakeEngine(max_len=1_000_000)) as served:
        body = json.dumps({"prompt": "x" * 1_000_000}).encode()
        head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\nconnection: %s\r\ncontent-length: %d\r\n\r\n"
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        loop = asyncio.get_running_loop()
        with one:
            await loop.sock_connect(one, ("127.0.0.1", served.port))
            await loop.sock_sendall(one, head % (connection, len(body)) + body)
            while not served.front.num_inside:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(30):
                while served.listener.num_connections:
                    await asyncio.sleep(0.01)
            await served.quiet()


async def test_silent_streams_get_pings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.http.sse.PING_S", 0.5)
    monkeypatch.setattr("trireme.serving.http.sse.FIRST_EVENT_S", 0.2)
    engine = FakeEngine(words("x", EOS))
    engine.places = True
    async with serve(tmp_path, engine) as served:
        engine.hold.clear()
        asyncio.get_running_loop().call_later(2.5, engine.hold.set)
        status, _, answer = await served.request("POST", "/v1/completions", {**TEXT, "stream": True})
        assert status == 200
        assert answer.startswith(b": waiting\n\n: ping\n\n")
        assert answer.endswith(b"data: [DONE]\n\n")
        assert b'"text":"x"' in answer


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {"stream": False}])
async def test_what_is_refused_while_it_is_queued_gets_a_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """However long it has been queued: 503 and when to come again, and no 200 with an error in it."""
    monkeypatch.setattr("trireme.serving.http.sse.FIRST_EVENT_S", 0.05)
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        engine.hold.clear()
        asyncio.get_running_loop().call_later(0.3, engine.refuse_queued, "it would wait about 22 s", 7.0)
        status, headers, answer = await served.request("POST", "/v1/completions", {**TEXT, **fields})
        assert (status, headers["retry-after"]) == (503, "7"), answer
        error = json.loads(answer)["error"]
        assert (error["code"], error["message"]) == ("overloaded", "it would wait about 22 s")


async def opened(served: Served, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream that has begun."""
    body = json.dumps({**TEXT, "stream": True, "max_tokens": 500, **fields}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"\n\n")
    return reader, writer


async def test_draining_lets_streams_finish(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("a" * 100, EOS), step_s=0.003)) as served:
        reader, writer = await opened(served)
        leaving = asyncio.ensure_future(drain(served.front, served.listener, notice_s=0.1, deadline_s=10))
        await asyncio.sleep(0.02)
        assert (await served.request("GET", "/ready"))[0] == 503
        assert (await served.post("/v1/completions", {**TEXT, "max_tokens": 1}))[0] == 200  # within the notice period
        await asyncio.sleep(0.1)
        status, headers, _ = await served.request("POST", "/v1/completions", TEXT)
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        rest = await reader.read()
        writer.close()
        assert b"data: [DONE]" in rest
        await leaving
        with pytest.raises(ConnectionError):
            await served.request("GET", "/health")


async def test_draining_ends_what_is_too_long_with_an_error(tmp_path: Path) -> None:
    engine = FakeEngine(words("a" * 10_000), step_s=0.003)
    async with serve(tmp_path, engine) as served:
        reader, writer = await opened(served, max_tokens=1500)
        await drain(served.front, served.listener, notice_s=0.0, deadline_s=0.2)
        rest = await reader.read()
        writer.close()
        assert b"shutting down" in rest
        assert b"[DONE]" not in rest
        assert engine.rows == {}


async def test_a_failure_of_ours_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(tmp_path, FakeEngine()) as served:

        def explode(*_: object, **__: object) -> None:
            raise RuntimeError("secret path /etc/shadow at 0x7fff")

        monkeypatch.setattr(served.front.tokenizer, "encode", explode)
        status, headers, body = await served.request("POST", "/tokenize", {"prompt": "x"})
        assert status == 500
        assert b"secret" not in body
        assert headers["x-request-id"] in json.loads(body)["error"]["message"]
        assert "secret path" in caplog.text

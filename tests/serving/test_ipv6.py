"""A server on IPv6 addresses: the socket that `trireme serve` makes, the Host check, and every client of ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import openai
import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme import AsyncHosts
from trireme.errors import ConfigError
from trireme.launch.api.http import ServerError, endpoint, get_json, stream
from trireme.launch.commands.serve import url_of
from trireme.launch.processes.listeners import listen
from trireme.netloc import is_address, is_loopback, netloc, without_port


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


async def answers(served: Served, host: str) -> None:
    """All clients reach the server at `host`, without a key."""
    url = f"http://{netloc(host, served.port)}"
    to = endpoint(url)
    assert to.url == url
    assert (await get_json(to, "/v1/models"))["data"][0]["id"] == "stub"
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    assert "".join([event["choices"][0]["text"] async for event in stream(to, "/v1/completions", body)]) == "ab"
    async with AsyncHosts([url]) as hosts:
        assert (await hosts.complete("x", max_tokens=2))["choices"][0]["text"] == "ab"
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="stub", prompt="x", max_tokens=2)
        assert answer.choices[0].text == "ab"


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_clients_reach_a_server_on_the_ipv6_loopback(tmp_path: Path, host: str) -> None:
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), host=host) as served:
        await answers(served, "::1")
        own = endpoint(f"http://[::1]:{served.port}")
        for name, allowed in (
            ("[::1]", True),
            ("localhost", True),
            ("evil.example", False),
            ("::1", False),
            ("[::1].a", False),
        ):
            reader, writer = await asyncio.open_connection("::1", served.port)
            writer.write(f"GET /v1/models HTTP/1.1\r\nHost: {name}:{served.port}\r\nConnection: close\r\n\r\n".encode())
            status = int((await reader.readline()).split()[1])
            writer.close()
            assert status == (200 if allowed else 403), name
        assert own.authority == f"[::1]:{served.port}"


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "*", ""])
async def test_every_address_is_one_of_both_kinds(tmp_path: Path, host: str) -> None:
    """And the address that the start prints works."""
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), host=host) as served:
        await answers(served, "::1")
        await answers(served, "127.0.0.1")
        shown = url_of("::", served.port)
        assert (await get_json(endpoint(shown), "/v1/models"))["data"]


@needs_ipv6
async def test_the_loopback_of_one_kind_is_not_that_of_the_other(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), host="::1") as served:
        with pytest.raises(ServerError, match=rf"no server answers at http://127.0.0.1:{served.port}"):
            await get_json(endpoint(f"http://127.0.0.1:{served.port}"), "/v1/models")


def test_what_cannot_be_listened_on_is_said_with_its_name() -> None:
    with pytest.raises(ConfigError, match="cannot listen on no.such.host.invalid port 0"):
        listen("no.such.host.invalid", 0)


def test_a_url_without_brackets_is_refused_with_the_form_that_works() -> None:
    for url in ("http://::1:8000", "::1", "http://[::1:8000", "http://host:x"):
        with pytest.raises(ConfigError) as caught:
            endpoint(url)
        assert "http://[::1]:8000" in caught.value.message + caught.value.hint, url


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("a.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("fe80::1%lo", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_what_is_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_parts_of_a_host_header() -> None:
    for text, host in (
        ("a:1", "a"),
        ("a", "a"),
        ("[::1]:1", "[::1]"),
        ("[::1]", "[::1]"),
        ("::1", "::1"),
        ("a:x", "a:x"),
        ("", ""),
    ):
        assert without_port(text) == host
    for text in ("1.2.3.4", "[::1]", "[fe80::1]"):
        assert is_address(text)
    for text in ("::1", "1.2.3", "[1.2.3.4]", "a", "[::1", ""):
        assert not is_address(text)

"""Web pages as clients: what a browser asks before it lets a page in, and what it must see on every answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.errors import ConfigError
from trireme.serving.http.cors import EXPOSED, AllowedOrigins

APP, OTHER = "https://app.example", "https://evil.example"
TEXT = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}
WANTED = "authorization,content-type,x-stainless-lang"


async def preflight(served: Served, origin: str, path: str = TEXT, **more: str) -> tuple[int, dict[str, str], bytes]:
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": WANTED}
    return await served.request("OPTIONS", path, headers={**headers, **more})


async def test_a_page_of_an_allowed_origin_may_use_the_server(tmp_path: Path) -> None:
    """As a browser does it: a preflight without the key, then the request with it; streamed, refused or unknown alike."""
    settings = {"api_key": ("secret",), "cors_origins": (APP, "http://localhost:3000")}
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), **settings) as served:
        for origin in (APP, "http://localhost:3000"):
            status, headers, body = await preflight(served, origin)
            assert (status, body) == (204, b"")
            assert headers["access-control-allow-origin"] == origin
            assert "POST" in headers["access-control-allow-methods"]
            assert headers["access-control-allow-headers"] == WANTED
            assert int(headers["access-control-max-age"]) > 0
            assert "Origin" in headers["vary"]
            assert "access-control-allow-private-network" not in headers
        near = {"access-control-request-private-network": "true"}
        _, headers, _ = await preflight(served, APP, **near)
        assert headers["access-control-allow-private-network"] == "true"

        key = {"authorization": "Bearer secret", "origin": APP}
        for method, path, request, expected in (
            ("POST", TEXT, BODY, 200),
            ("POST", TEXT, {**BODY, "stream": True}, 200),
            ("POST", TEXT, {**BODY, "n": 0}, 400),
            ("GET", "/v1/models", None, 200),
            ("GET", "/v1/nothing", None, 404),
            ("GET", TEXT, None, 405),
            ("GET", "/health", None, 200),
            ("POST", "/sleep", None, 403),
        ):
            status, headers, answer = await served.request(method, path, request, key)
            assert status == expected, path
            assert headers["access-control-allow-origin"] == APP
            assert headers["access-control-expose-headers"] == ", ".join(EXPOSED)
            assert headers["vary"] == "Origin"
            assert not (request and request.get("stream")) or b"[DONE]" in answer
        status, headers, _ = await served.request("POST", TEXT, BODY, {"origin": APP})
        assert (status, headers["access-control-allow-origin"]) == (401, APP)


async def test_other_pages_and_other_settings_get_nothing(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), api_key=("secret",), cors_origins=(APP,)) as served:
        assert (await preflight(served, OTHER))[0] == 401
        for origin in (OTHER, "http://app.example", APP + ".evil.example", "https://app.example:444", "null", ""):
            key = {"authorization": "Bearer secret", "origin": origin}
            status, headers, _ = await served.request("POST", TEXT, BODY, key)
            assert status == 200  # the key decides; the browser keeps the answer from the page
            assert "access-control-allow-origin" not in headers, origin
            assert headers["vary"] == "Origin"
        key = {"authorization": "Bearer secret"}
        assert (await served.request("OPTIONS", TEXT, headers=key | {"origin": APP}))[1]["allow"] == "POST, OPTIONS"
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), api_key=("secret",)) as served:
        assert (await preflight(served, APP))[0] == 401
        status, headers, _ = await served.request("POST", TEXT, BODY, {"authorization": "Bearer secret", "origin": APP})
        assert status == 200
        assert not [name for name in headers if name.startswith("access-control") or name == "vary"]


async def test_all_pages(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ab", EOS)), cors_origins=("*",)) as served:
        for origin in (APP, OTHER, "null"):
            status, headers, _ = await preflight(served, origin)
            assert (status, headers["access-control-allow-origin"]) == (204, "*")
            status, headers, _ = await served.request("POST", TEXT, BODY, {"origin": origin})
            assert (status, headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize(
    ("given", "origin", "allowed"),
    [
        (["https://app.example"], "https://app.example", True),
        (["https://App.Example/"], "https://app.example", True),
        (["https://app.example:443"], "https://app.example", True),
        (["https://app.example"], "https://app.example:443", True),
        (["http://app.example:443"], "http://app.example", False),
        (["http://[::1]:3000"], "http://[::1]:3000", True),
        (["null"], "null", True),
        (["vscode-webview://abc"], "vscode-webview://abc", True),
        (["https://app.example"], "https://app.example.evil", False),
        (["https://app.example"], "https://xapp.example", False),
        ([], "https://app.example", False),
        (["*"], "anything", True),
    ],
)
def test_origins_are_compared_as_browsers_write_them(given: list[str], origin: str, allowed: bool) -> None:
    assert AllowedOrigins(given).is_allowed(origin) is allowed


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/x", "https://*.example", "https://", "", "a b://c"]
)
def test_what_is_no_origin_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(ConfigError, match="cors-origins"):
        AllowedOrigins([wrong])


@pytest.mark.parametrize("wanted", ["x\r\nset-cookie: a", "a" * 3000, "a,,b", "(x)"])
def test_what_is_no_list_of_headers_is_not_echoed(wanted: str) -> None:
    asked = {
        b"origin": b"null",
        b"access-control-request-method": b"POST",
        b"access-control-request-headers": wanted.encode(),
    }
    names = dict(AllowedOrigins(["*"]).preflight_headers(asked) or [])
    assert names[b"access-control-allow-origin"] == b"*"
    assert b"access-control-allow-headers" not in names

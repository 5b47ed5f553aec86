"""Web pages of other sites cannot use a server without keys; its own pages and all other clients can."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import serve
from tests.serving.engines import FakeEngine, words
from trireme.serving.http.origin import is_foreign
from trireme.transport.wire.messages import Submit

TEXT = {"model": "stub", "prompt": "hello"}
HOST = "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"origin": "http://127.0.0.1:8000"}, False),
        ({"origin": "HTTP://127.0.0.1:8000"}, False),
        ({"origin": "http://127.0.0.1:3000"}, True),
        ({"origin": "https://evil.example"}, True),
        ({"origin": "null"}, True),
        ({"origin": ""}, True),
        ({"origin": "http://127.0.0.1:8000.evil.example"}, True),
        ({"sec-fetch-site": "cross-site"}, True),
        ({"sec-fetch-site": "same-site"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "https://app.example"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "https://app.example.evil"}, True),
    ],
)
def test_what_browsers_say_of_a_request(headers: dict[str, str], expected: bool) -> None:
    given = [(b"host", HOST.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    assert is_foreign("POST", given, {"https://app.example"}.__contains__) is expected
    assert is_foreign("DELETE", given, {"https://app.example"}.__contains__) is expected
    assert not is_foreign("GET", given)
    assert not is_foreign("OPTIONS", given)


async def test_a_page_of_another_site_computes_nothing(tmp_path: Path) -> None:
    """A simple request of a page needs nobody's leave: it has no content-type of JSON, or none at all."""
    engine = FakeEngine(words("x", EOS))
    body = json.dumps(TEXT).encode()
    head = "POST {} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n{}\r\n"
    async with serve(tmp_path, engine) as served:
        host = f"127.0.0.1:{served.port}"
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            for said in ("origin: https://evil.example\r\nsec-fetch-site: cross-site\r\n", "origin: null\r\n"):
                status, _, answer = await served.send(head.format(path, host, len(body), said).encode() + body)
                assert status == 403
                assert json.loads(answer)["error"]["code"] == "forbidden"
        assert not [message for message in engine.log if isinstance(message, Submit)]
        own = f"origin: http://{host}\r\nsec-fetch-site: same-origin\r\ncontent-type: application/json\r\n"
        assert (await served.send(head.format("/v1/completions", host, len(body), own).encode() + body))[0] == 200
        assert (await served.send(head.format("/v1/completions", host, len(body), "").encode() + body))[0] == 200


async def test_a_key_is_leave_enough(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine, api_key=("secret",)) as served:
        page = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
        assert (await served.request("POST", "/v1/completions", TEXT, page))[0] == 401
        with_key = {**page, "authorization": "Bearer secret"}
        assert (await served.request("POST", "/v1/completions", TEXT, with_key))[0] == 200

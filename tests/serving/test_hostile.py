"""Hostile requests: whatever is sent, the status is one of the stated ones, nothing is left behind, the server goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.serving.api.openai import wire
from trireme.serving.app import make_app

ATOMS: list[Any] = [
    None,
    True,
    0,
    1,
    -1,
    17,
    2**31,
    2**63,
    2**70,
    -(2**63),
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "\x00",
    "</s>",
    "e\u0301" * 500,
    "\ue000-0\ue001",
    [],
    {},
    [[]],
    [None],
    [-1],
    [300],
    [2**31],
    ["a", 1],
    [["a"]],
    {"type": "json_schema"},
    {"type": "text"},
    {"type": []},
    {"300": 1},
    {"1": 100},
    {"include_usage": True},
    [{"role": "user", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
    [{"role": "tool", "content": "r", "tool_call_id": "1"}] * 3,
]
STATED = {200, 400, 404, 413, 415, 503}


async def ask(served: Served, app: Any, path: str, body: bytes) -> tuple[int, bytes]:
    """One request straight into the application."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "state": {},
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    out: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await served.engine.never.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        out.append(message)

    await app(scope, receive, send)
    return out[0]["status"], b"".join(message.get("body", b"") for message in out[1:])


@pytest.mark.parametrize("seed", range(4))
async def test_random_requests_get_stated_answers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    fields = {
        "/v1/completions": sorted(wire.CompletionRequest.__struct_fields__),
        "/v1/chat/completions": sorted(wire.ChatRequest.__struct_fields__),
        "/tokenize": sorted(wire.TokenizeRequest.__struct_fields__),
        "/detokenize": sorted(wire.DetokenizeRequest.__struct_fields__),
    }
    engine = FakeEngine(words("x", EOS), max_len=80)
    async with serve(tmp_path, engine) as served:
        app = make_app(served.front)
        seen: dict[int, int] = {}
        for _ in range(400):
            path = rng.choice(list(fields))
            body: dict[str, Any] = {"prompt": "x"} if "chat" not in path else {"messages": ATOMS[-4]}
            if path == "/detokenize":
                body = {"tokens": [1]}
            for _ in range(rng.randrange(4)):
                body[rng.choice(fields[path])] = rng.choice(ATOMS)
            status, answer = await ask(served, app, path, json.dumps(body).encode())
            assert status in STATED, (path, body, answer)
            if status >= 400:
                error = json.loads(answer)["error"]
                assert error["message"]
                assert error["type"] in ("invalid_request_error", "overloaded_error", "server_error")
            seen[status] = seen.get(status, 0) + 1
        assert seen[200] > 50
        assert seen[400] > 50
        await served.quiet()
        telemetry = served.front.telemetry
        received = sum(v for k, v in telemetry.counters.items() if k.startswith("trireme_requests_received"))
        ended = sum(v for k, v in telemetry.counters.items() if k.startswith("trireme_requests|"))
        assert received == ended
        assert telemetry.open == 0


@pytest.mark.parametrize("seed", range(2))
async def test_mangled_bytes_get_stated_answers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    good = json.dumps(
        {"messages": [{"role": "user", "content": "h\u00e9llo"}], "n": 2, "stop": ["a"], "seed": 1}
    ).encode()
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        app = make_app(served.front)
        for _ in range(400):
            body = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(body))
                match rng.randrange(3):
                    case 0:
                        body[at] = rng.randrange(256)
                    case 1:
                        del body[at : at + rng.randrange(8)]
                    case _:
                        body[at:at] = bytes([rng.randrange(256)]) * rng.randrange(6)
            status, answer = await ask(served, app, "/v1/chat/completions", bytes(body))
            assert status in STATED, (bytes(body), answer)

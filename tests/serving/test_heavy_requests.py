"""One request, however large or odd, does not hold up the others: the loop goes on, and what cannot fit is refused at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.serving.text.chat_prompt import ChatRenderer

LONGEST_S = 1.0  # that the loop may stand still, on a busy machine; a few ms on an idle one
ROOM = 10_000_000  # of context: everything fits, and is done
NAMES = frozenset(f"<unused{i}>" for i in range(6242))


@contextlib.asynccontextmanager
async def turning() -> AsyncIterator[None]:
    """Fails when the loop stood still for longer than LONGEST_S inside."""
    gaps = [0.0]

    async def turn() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    task = asyncio.ensure_future(turn())
    yield
    await asyncio.sleep(0.02)
    task.cancel()
    assert max(gaps) < LONGEST_S


async def heavy(served: Served, path: str, body: dict[str, Any], raw: bytes | None = None) -> tuple[int, Any]:
    data = raw if raw is not None else json.dumps(body).encode()
    async with turning():
        status, _, answer = await served.request("POST", path, raw=data)
    return status, json.loads(answer) if status == 400 else None


async def test_long_texts_and_odd_names_leave_the_loop_alone(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS), max_len=ROOM, max_waiting_tokens=ROOM, num_blocks=ROOM)
    async with serve(tmp_path, engine) as served:
        served.front.renderer = ChatRenderer(served.front.renderer.template, NAMES)
        status, _ = await heavy(served, "/tokenize", {"prompt": "a" * 3_000_000})
        assert status == 200
        many = "<unused" * 200_000
        status, _ = await heavy(
            served, "/v1/chat/completions", {"messages": [{"role": "user", "content": many}], "max_tokens": 1}
        )
        assert status == 200
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": many})}}
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for path in ("/v1/chat/completions", "/tokenize"):
            status, _ = await heavy(served, path, {"messages": turns})
            assert status == 200
        ids = b'{"tokens": [' + b"65," * 2_000_000 + b"65]}"
        status, _ = await heavy(served, "/detokenize", {}, ids)
        assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "1" * 2_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "1" * 2_000_000}]}, "messages"),
        ("/v1/completions", {"prompt": "\U0001f600" * 400_000}, "prompt"),
        ("/v1/completions", {"prompt": [7] * 1_000_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1" * 2_000_000}]}, "messages"),
        ("/detokenize", {"tokens": [65] * 4000}, "tokens"),
    ],
)
async def test_what_cannot_fit_the_context_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    async with serve(tmp_path, FakeEngine()) as served:

        def untouched(*_: object, **__: object) -> None:
            raise AssertionError("the text was tokenized")

        for name in ("encode", "encode_segments", "decode"):
            monkeypatch.setattr(served.front.tokenizer, name, untouched)
        status, answer = await heavy(served, path, body)
        assert status == 400
        error = answer["error"]
        assert (error["code"], error["param"], error["type"]) == (
            "context_length_exceeded",
            param,
            "invalid_request_error",
        )
        assert "2048" in error["message"]


async def test_fields_are_refused_before_they_are_built(tmp_path: Path) -> None:
    bias = b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(700_000)) + b"}}"
    tools = b'{"messages": [{"role": "user", "content": "x"}], "tools": [' + b"{}," * 2_500_000 + b"{}]}"
    keys = b'{"prompt": "x"' + b"".join(b',"%d":1' % i for i in range(700_000)) + b"}"
    async with serve(tmp_path, FakeEngine()) as served:
        for path, raw, part in (
            ("/v1/completions", bias, "logit_bias has 700000 entries; the limit is 1024"),
            ("/v1/chat/completions", tools, "tools has 2500001 entries"),
            ("/v1/completions", keys, "the body has 700001 fields"),
        ):
            status, answer = await heavy(served, path, {}, raw)
            assert status == 400
            assert part in answer["error"]["message"]

"""Sampling parameters that leave no token are the caller's fault: 400 at once where it can be seen, else when it is met, for
that request alone. Over a real engine with the real sampler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.tiny import EOS, make_tiny_llama
from tests.serving.deployment import Served, serve_model

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
A, B = ord("a"), ord("b")
AT_ONCE: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": [A], "bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": [A, B], "bad_words": ["a", "b"]}, "bad_words"),
    ({"allowed_token_ids": [EOS], "min_tokens": 2}, "min_tokens"),
    ({"allowed_token_ids": [A], "stop_token_ids": [A], "min_tokens": 1}, "min_tokens"),
    ({"allowed_token_ids": [A, B, EOS], "stop_token_ids": [A], "bad_words": ["b"], "min_tokens": 1}, "min_tokens"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty"),
    ({"repetition_penalty": 100.5}, "repetition_penalty"),
]
# after the first a, the second is barred
LATER = {"prompt": "x", "allowed_token_ids": [A], "bad_words": ["aa"], "max_tokens": 8}
POSSIBLE: list[dict[str, Any]] = [
    {"allowed_token_ids": [EOS]},
    {"allowed_token_ids": [EOS], "min_tokens": 2, "ignore_eos": True},
    {"allowed_token_ids": [A, EOS], "min_tokens": 2},
    {"allowed_token_ids": [A], "bad_words": ["b"]},
    {"allowed_token_ids": [A], "bad_words": ["a"], "max_tokens": 0},
    {"repetition_penalty": 0.01, "frequency_penalty": -2, "presence_penalty": -2},
    {"repetition_penalty": 100, "frequency_penalty": 2, "presence_penalty": 2},
    {"top_p": 1e-300, "min_p": 1.0, "temperature": 100},
    {"temperature": 1e-300},
    {"temperature": 1.1e-5, "repetition_penalty": 0.01},
    {"logit_bias": {str(token): -100 for token in range(258)}},
]


async def test_parameters_that_leave_nothing(tmp_path: Path) -> None:
    async with serve_model(make_tiny_llama(tmp_path / "m")) as served:
        for fields, param in AT_ONCE:
            for stream in (False, True):
                body = {"prompt": "x", "max_tokens": 4, "stream": stream, **fields}
                status, answer = await served.post(TEXT, body)
                assert (status, answer["error"]["param"]) == (400, param), fields
        for fields in POSSIBLE:
            for temperature in (0, 1):
                body = {"prompt": "xx", "max_tokens": 4, "temperature": temperature, **fields}
                status, answer = await served.post(TEXT, body)
                assert status == 200, (fields, answer)
        await check_later(served)
        stats = await served.front.client.call(0, "stats")
        assert stats["row_faults"] == 0
        await served.freed()


async def check_later(served: Served) -> None:
    mate = {"prompt": "mate", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    _, alone = await served.post(TEXT, mate)
    beside = asyncio.create_task(served.post(TEXT, mate))
    status, answer = await served.post(TEXT, LATER)
    assert (status, answer["error"]["code"]) == (400, "invalid_value")
    assert answer["error"]["type"] == "invalid_request_error"
    for field in ("allowed_token_ids", "bad_words", "min_tokens"):
        assert field in answer["error"]["message"]
    events = await served.events(TEXT, LATER)
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["code"] == "invalid_value"
    with pytest.raises(openai.BadRequestError):  # which the client does not send again
        await served.openai.with_options(max_retries=2).completions.create(
            model="stub", prompt="x", max_tokens=8, extra_body={"allowed_token_ids": [A], "bad_words": ["aa"]}
        )
    _, found = await beside
    assert found["choices"] == alone["choices"]

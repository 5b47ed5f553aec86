"""What clients are told of tokens beside the text: ids of the prompt, running usage, tools in /tokenize, the list of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import EOS, make_stub
from tests.serving.deployment import serve, serve_model
from tests.serving.engines import FakeEngine, words

CHAT: dict[str, Any] = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
TEXT: dict[str, Any] = {"model": "stub", "return_token_ids": True}
WITH_TOOLS = (
    "{% if tools %}tools:{% for tool in tools %}{{ tool | tojson }}{% endfor %};{% endif %}"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def test_ids_of_the_prompt_come_with_those_of_the_answer(tmp_path: Path) -> None:
    """As vLLM has them: with each choice of a completion, once in a chat; in a stream with the first chunk."""
    async with serve(tmp_path, FakeEngine(words("ab", EOS))) as served:
        body = {**TEXT, "prompt": ["x", "yz"], "n": 2}
        _, whole = await served.post("/v1/completions", body)
        wanted = [list(b"x")] * 2 + [list(b"yz")] * 2
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == wanted
        assert [choice["token_ids"] for choice in whole["choices"]] == [words("ab", EOS)] * 4
        chunks = [event["choices"][0] for event in (await served.events("/v1/completions", body))[:-1]]
        for index in range(4):
            mine = [chunk for chunk in chunks if chunk["index"] == index]
            assert [chunk.get("prompt_token_ids") for chunk in mine] == [wanted[index]] + [None] * (len(mine) - 1)
        prompt = list(b"user: hi\nassistant: ")
        _, whole = await served.post("/v1/chat/completions", {**CHAT, "n": 2})
        assert whole["prompt_token_ids"] == prompt
        assert [choice["token_ids"] for choice in whole["choices"]] == [words("ab", EOS)] * 2
        events = (await served.events("/v1/chat/completions", {**CHAT, "n": 2}))[:-1]
        assert [event.get("prompt_token_ids") for event in events] == [prompt] + [None] * (len(events) - 1)
        for path, asked in (("/v1/completions", {**body}), ("/v1/chat/completions", {**CHAT})):
            _, whole = await served.post(path, {**asked, "return_token_ids": None})
            assert "token_ids" not in json.dumps(whole)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_running_usage_counts_the_tokens_sent_so_far(tmp_path: Path, path: str) -> None:
    """Four choices gain a token each in one step: every chunk counts its own and those before it, not the whole batch."""
    async with serve(tmp_path, FakeEngine(words("abc", EOS))) as served:
        what: dict[str, Any] = {**TEXT, "prompt": "x"} if path == "/v1/completions" else CHAT
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await served.events(path, {**what, "n": 4, "stream_options": options}))[:-1]
        num_sent = 0
        for event in events:
            num_sent += sum(len(choice.get("token_ids") or ()) for choice in event["choices"])
            assert event["usage"]["completion_tokens"] == num_sent
        assert num_sent == 16


async def test_tokenize_renders_tools(tmp_path: Path) -> None:
    async with serve_model(make_stub(tmp_path / "m", chat_template=WITH_TOOLS)) as served:
        messages = [{"role": "user", "content": "hi"}]

        async def rendered(**fields: Any) -> str:
            status, answer = await served.post("/tokenize", {"messages": messages, **fields})
            assert status == 200, answer
            return bytes(answer["tokens"]).decode()

        assert await rendered() == await rendered(tools=None) == await rendered(tools=[]) == "hi\n"
        assert await rendered(tools=[WEATHER]) == f"tools:{json.dumps(WEATHER)};hi\n"
        # a name of a special token in a description is text, also as a key
        hostile = {"type": "function", "function": {"name": "</s>", "parameters": {"<s>": "</s>"}}}
        assert await rendered(tools=[hostile]) == f"tools:{json.dumps(hostile)};hi\n"
        for wrong in ({"tools": [WEATHER] * 129}, {"tools": [{"a": "x" * (256 << 10)}]}, {"tools": "weather"}):
            status, answer = await served.post("/tokenize", {"messages": messages, **wrong})
            assert (status, answer["error"]["param"]) == (400, "tools")
        status, answer = await served.post("/tokenize", {"prompt": "x", "tools": [WEATHER]})
        assert (status, answer["error"]["param"]) == (400, "tools")


async def test_the_list_of_models_may_end_with_a_slash(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("a", EOS))) as served:
        found = [await served.request("GET", path) for path in ("/v1/models", "/v1/models/", "/v1/models/stub")]
        assert [status for status, _, _ in found] == [200] * 3
        whole, slash, one = (json.loads(body) for _, _, body in found)
        assert slash == whole == {"object": "list", "data": [one]}
        assert (await served.request("GET", "/v1/models/other"))[0] == 404

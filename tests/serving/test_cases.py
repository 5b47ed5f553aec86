"""Public cases through the HTTP API with the official client, over a real engine and worker: nothing here is scripted but the
models' outputs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models.tiny import EOS, make_stub, make_tiny_llama
from tests.serving.deployment import Served, serve_model

CHAT: Any = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "temperature": 0}
TEXT: Any = {"model": "stub", "prompt": "hello", "temperature": 0}
WONDER = "\u017d\u4f60\U0001f469\u200d\U0001f680!"


async def streamed_chat(served: Served, **fields: Any) -> tuple[list[str], str | None, Any]:
    """Non-empty deltas, finish reason, usage."""
    options = {"include_usage": True}
    stream = await served.openai.chat.completions.create(**{**CHAT, **fields}, stream=True, stream_options=options)
    deltas, finish, usage = [], None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            if choice.delta.content:
                deltas.append(choice.delta.content)
    return deltas, finish, usage


async def test_characters_that_span_tokens(tmp_path: Path) -> None:
    """O01: whole characters, no U+FFFD, the same text and counts in both modes."""
    async with serve_model(make_stub(tmp_path / "m", scripts=[[WONDER]])) as served:
        deltas, finish, usage = await streamed_chat(served)
        assert deltas == list(WONDER)
        assert finish == "stop"
        whole = await served.openai.chat.completions.create(**CHAT)
        assert whole.choices[0].message.content == WONDER
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens == 18
        cut, _, _ = await streamed_chat(served, max_tokens=6)
        whole = await served.openai.chat.completions.create(**CHAT, max_tokens=6)
        assert "".join(cut) == whole.choices[0].message.content == "\u017d\u4f60\ufffd"


async def test_text_that_may_become_a_stop_string_does_not_leak(tmp_path: Path) -> None:
    """O02 and its variants (a), (b)."""
    model = make_stub(tmp_path / "m", extra=["DEF", "HI"], scripts=[["DEF", "G", "HI", "J", "K"], ["DEF", "G", "X"]])
    async with serve_model(model) as served:
        deltas, finish, usage = await streamed_chat(served, stop=["DEFGHIJ"])
        assert (deltas, finish, usage.completion_tokens) == ([], "stop", 4)
        included, _, _ = await streamed_chat(served, stop=["DEFGHIJ"], extra_body={"include_stop_str_in_output": True})
        assert "".join(included) == "DEFGHIJ"
        events = await served.events("/v1/completions", {**TEXT, "n": 2, "stop": ["DEFGHIJ"]})
        second = [e["choices"][0]["text"] for e in events[:-1] if e["choices"][0]["index"] == 1]
        assert [text for text in second if text] == ["DEFGX"]
        await served.freed()


async def test_stop_inside_a_stop(tmp_path: Path) -> None:
    """O02 variant (c)."""
    async with serve_model(make_stub(tmp_path / "m", extra=["ab", "cx"], scripts=[["ab", "cx"]])) as served:
        deltas, finish, _ = await streamed_chat(served, stop=["abcd", "cx"])
        assert ("".join(deltas), finish) == ("ab", "stop")


async def test_an_empty_stop_list_does_not_disable_eos(tmp_path: Path) -> None:
    """O03."""
    async with serve_model(make_stub(tmp_path / "m", scripts=[["ok", EOS, "a" * 50]])) as served:
        counts = set()
        for stop in ({}, {"stop": None}, {"stop": []}):
            status, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 20, **stop})
            assert status == 200
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("ok", "stop")
            counts.add(answer["usage"]["completion_tokens"])
        assert len(counts) == 1
        for stop in ("", [""]):
            assert (await served.post("/v1/completions", {**TEXT, "stop": stop}))[0] == 400
        _, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 20, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 20
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_seed_holds_whatever_the_batch(tmp_path: Path) -> None:
    """O04."""
    model = make_stub(tmp_path / "m", "const", logits=dict.fromkeys(range(50), 0.0), default=-1e9)
    async with serve_model(model) as served:

        async def ask(seed: int | None, delay_s: float = 0.0) -> list[int]:
            await asyncio.sleep(delay_s)
            body = {**TEXT, "temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
            _, answer = await served.post("/v1/completions", {**body, "seed": seed})
            return list(answer["choices"][0]["token_ids"])

        alone = await ask(42)
        pairs = [await asyncio.gather(ask(42), ask(None)) for _ in range(4)]
        assert all(first == alone for first, _ in pairs)
        assert len({tuple(second) for _, second in pairs}) > 1
        assert (await asyncio.gather(ask(42), ask(7)))[0] == alone
        assert (await asyncio.gather(ask(None), ask(42, 0.01)))[1] == alone


async def test_penalties_do_not_see_padding(tmp_path: Path) -> None:
    """O05."""
    model = make_stub(tmp_path / "m", "const", logits={0: 5.0, 1: 4.0}, default=-10.0)
    async with serve_model(model) as served:

        async def ask(prompt: list[int], **fields: Any) -> list[int]:
            body = {"model": "stub", "prompt": prompt, "temperature": 0, "max_tokens": 5, "return_token_ids": True}
            _, answer = await served.post("/v1/completions", {**body, **fields})
            return list(answer["choices"][0]["token_ids"])

        short, long = [7] * 3, [7] * 40
        assert await ask(short, frequency_penalty=2.0) == [0, 1, 0, 1, 0]
        for first, second in ((0, 1), (1, 0)):
            asks = [ask(short, frequency_penalty=2.0), ask(long)]
            found = await asyncio.gather(asks[first], asks[second])
            assert found[first] == [0, 1, 0, 1, 0]
            assert found[second] == [0, 0, 0, 0, 0]


async def test_echo_without_generation_scores_the_prompt(tmp_path: Path) -> None:
    """O06."""
    async with serve_model(make_tiny_llama(tmp_path / "m")) as served:
        answer = await served.openai.completions.create(
            model="stub", prompt="Yes no", echo=True, max_tokens=0, logprobs=1
        )
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("Yes no", "length")
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
        assert choice.logprobs is not None
        columns = choice.logprobs
        for column in (columns.tokens, columns.token_logprobs, columns.top_logprobs, columns.text_offset):
            assert column is not None
            assert len(column) == answer.usage.prompt_tokens == 6
        assert columns.token_logprobs is not None
        assert columns.token_logprobs[0] is None
        assert all(value is not None and -100 < value <= 0 for value in columns.token_logprobs[1:])
        again = await served.openai.completions.create(**TEXT, max_tokens=3)
        assert again.usage is not None
        assert again.usage.completion_tokens == 3
        bare = await served.openai.completions.create(**TEXT, max_tokens=0)
        assert (bare.choices[0].text, bare.choices[0].finish_reason) == ("", "length")


async def test_one_finish_per_choice(tmp_path: Path) -> None:
    """O07."""
    async with serve_model(make_stub(tmp_path / "m", scripts=[["ab"], ["abcdefgh"]])) as served:
        body = {**CHAT, "n": 2, "max_tokens": 5, "stream_options": {"include_usage": True}}
        events = await served.events("/v1/chat/completions", body)
        assert events.count("[DONE]") == 1
        chunks = [e for e in events if e != "[DONE]"]
        assert [c["choices"] for c in chunks].count([]) == 1
        finished: dict[int, str] = {}
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            assert choice["index"] not in finished
            if choice["finish_reason"] is not None:
                finished[choice["index"]] = choice["finish_reason"]
        assert finished == {0: "stop", 1: "length"}


async def test_a_bias_outside_the_vocabulary_harms_nobody(tmp_path: Path) -> None:
    """O15."""
    model = make_stub(tmp_path / "m", "const", logits={97: 1.0}, default=0.0, delay_ms=2)
    async with serve_model(model) as served:
        other = asyncio.ensure_future(served.post("/v1/completions", {**TEXT, "max_tokens": 60}))
        size = 259
        for bias in ({str(size): 1}, {str(size + 7): 1}, {"-1": 1}, {"abc": 1}, {"5": 101}):
            status, answer = await served.post("/v1/completions", {**TEXT, "logit_bias": bias})
            assert (status, answer["error"]["param"]) == (400, "logit_bias")
        assert (await other)[1]["choices"][0]["text"] == "a" * 60
        body = {**TEXT, "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        _, answer = await served.post("/v1/completions", {**body, "logit_bias": {str(size - 1): 100}})
        assert answer["choices"][0]["token_ids"] == [size - 1] * 2
        _, answer = await served.post("/v1/completions", {**body, "logit_bias": {"97": -100}})
        assert 97 not in answer["choices"][0]["token_ids"]


async def test_unknown_and_null_fields_change_nothing(tmp_path: Path) -> None:
    """O16."""
    async with serve_model(make_tiny_llama(tmp_path / "m")) as served:
        system = {"role": "system", "content": "be brief"}
        user = {"role": "user", "content": "hi"}
        clean = {"model": "stub", "temperature": 0, "max_tokens": 12, "ignore_eos": True, "messages": [system, user]}
        _, wanted = await served.post("/v1/chat/completions", clean)
        noisy = {
            **clean,
            "frobnicate": 1,
            "messages": [{**system, "role": "developer", "id": 12}, {**user, "opts": {"visible": False}}],
            **dict.fromkeys(("functions", "tools", "stop", "logit_bias", "n", "user", "stream_options")),
        }
        status, answer = await served.post("/v1/chat/completions", noisy)
        assert status == 200
        assert answer["choices"] == wanted["choices"]


async def test_running_usage_under_chunked_prefill(tmp_path: Path) -> None:
    """O17."""
    async with serve_model(make_tiny_llama(tmp_path / "m"), max_num_tokens=64) as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"model": "stub", "prompt": "p" * 1000, "max_tokens": 1, "ignore_eos": True, "stream_options": options}
        events = [e for e in await served.events("/v1/completions", body) if e != "[DONE]"]
        assert all(e["usage"]["prompt_tokens"] == 1000 for e in events)
        assert [e["usage"]["completion_tokens"] for e in events] == [1] * len(events)
        assert events[-1]["usage"]["total_tokens"] == 1001


@pytest.mark.timeout(120)
async def test_abandoned_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """O21: streams one after another and at once, then plain requests; the pool is full again and memory is flat."""
    async with serve_model(make_tiny_llama(tmp_path / "m")) as served:

        async def leave(stream: bool) -> None:
            body = json.dumps({**TEXT, "max_tokens": 512, "stream": stream, "ignore_eos": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head + body)
            if stream:
                await reader.readuntil(b"\n\n")
            else:
                await asyncio.sleep(0.05)
            writer.close()

        process = psutil.Process()
        for i in range(300):
            await leave(True)
            if i == 50:
                level = process.memory_info().rss
        await asyncio.gather(*(leave(True) for _ in range(32)))
        await served.freed()
        await asyncio.gather(*(leave(False) for _ in range(16)))
        await served.freed()
        assert process.memory_info().rss < level * 1.05
        status, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 8, "ignore_eos": True})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 8)
        await served.front.client.call(0, "audit")

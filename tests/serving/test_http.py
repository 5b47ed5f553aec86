"""The HTTP API as clients see it, with the official OpenAI client and by hand, over scripted engines."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import serve
from tests.serving.engines import FakeEngine, words
from trireme.transport.wire.messages import Submit

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "stub", "prompt": "hello"}
WONDER = "\u017d\u4f60\U0001f469\u200d\U0001f680!"


def prompt_of(engine: FakeEngine) -> str:
    (submit,) = [message for message in engine.log if isinstance(message, Submit)]
    return bytes(submit.prompt.tolist()).decode()


async def test_characters_that_span_tokens(tmp_path: Path) -> None:
    """O01: deltas hold whole characters, streamed equals whole, counts agree."""
    async with serve(tmp_path, FakeEngine(words(WONDER, EOS))) as served:
        stream = await served.openai.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}, temperature=0
        )
        chunks = [chunk async for chunk in stream]
        deltas = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
        assert deltas == list(WONDER)
        whole = await served.openai.chat.completions.create(**CHAT, temperature=0)
        assert whole.choices[0].message.content == WONDER
        assert whole.choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 18


async def test_cut_inside_a_character_is_alike_in_both_modes(tmp_path: Path) -> None:
    """O01 variant."""
    async with serve(tmp_path, FakeEngine(words(WONDER, EOS))) as served:
        events = await served.events("/v1/completions", {**TEXT, "max_tokens": 6})
        streamed = "".join(e["choices"][0]["text"] for e in events if e != "[DONE]")
        _, whole = await served.post("/v1/completions", {**TEXT, "max_tokens": 6})
        assert streamed == whole["choices"][0]["text"] == "\u017d\u4f60\ufffd"


async def test_stop_string_leaks_nothing_and_aborts_the_row(tmp_path: Path) -> None:
    """O02."""
    extra = ["DEF", "HI"]
    engine = FakeEngine([259, ord("G"), 260, *words("JKKK")])
    async with serve(tmp_path, engine, extra=extra) as served:
        body = {**CHAT, "stop": ["DEFGHIJ"], "stream_options": {"include_usage": True}}
        events = await served.events("/v1/chat/completions", body)
        assert not [e for e in events if e != "[DONE]" and e["choices"] and e["choices"][0]["delta"].get("content")]
        finish = [e["choices"][0]["finish_reason"] for e in events if e != "[DONE]" and e["choices"]]
        assert finish == [None, "stop"]
        assert events[-2]["usage"]["completion_tokens"] == 4
        await served.quiet()
        assert engine.aborted == [1]
        _, included = await served.post(
            "/v1/completions", {**TEXT, "stop": "DEFGHIJ", "include_stop_str_in_output": True}
        )
        assert included["choices"][0]["text"] == "DEFGHIJ"
        assert included["choices"][0]["stop_reason"] == "DEFGHIJ"


@pytest.mark.parametrize("stop", [{}, {"stop": None}, {"stop": []}])
async def test_an_empty_stop_list_does_not_disable_eos(tmp_path: Path, stop: dict[str, Any]) -> None:
    """O03."""
    async with serve(tmp_path, FakeEngine(words("ok", EOS, "a" * 50))) as served:
        _, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 20, **stop})
        assert answer["choices"][0]["text"] == "ok"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3


async def test_ignore_eos_is_the_switch(tmp_path: Path) -> None:
    """O03."""
    async with serve(tmp_path, FakeEngine(words("ok", EOS, "a" * 50))) as served:
        _, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 20, "ignore_eos": True})
        assert answer["choices"][0]["text"] == "ok" + "a" * 17
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 20
        status, _ = await served.post("/v1/completions", {**TEXT, "stop": [""]})
        assert status == 400


async def test_echo_without_generation(tmp_path: Path) -> None:
    """O06."""
    async with serve(tmp_path, FakeEngine(words("zz"))) as served:
        prompt = "Yes \u017do"
        answer = await served.openai.completions.create(
            model="stub", prompt=prompt, echo=True, max_tokens=0, logprobs=1
        )
        choice = answer.choices[0]
        assert choice.text == prompt
        assert choice.finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
        size = answer.usage.prompt_tokens
        scores = choice.logprobs
        assert scores is not None
        assert size == len(prompt.encode())
        for column in (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset):
            assert column is not None
            assert len(column) == size
        assert scores.token_logprobs is not None
        assert scores.token_logprobs[0] is None
        assert all(value is not None and value <= 0 for value in scores.token_logprobs[1:])
        assert scores.text_offset == [0, 1, 2, 3, 4, 4, 5]
        assert scores.tokens is not None
        assert scores.tokens[4:6] == ["bytes:\\xc5", "bytes:\\xbd"]
        again = await served.openai.completions.create(**TEXT, max_tokens=0)
        assert again.choices[0].text == ""


async def test_prompt_logprobs(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("z", EOS))) as served:
        _, answer = await served.post("/v1/completions", {"model": "stub", "prompt": "abc", "prompt_logprobs": 1})
        found = answer["choices"][0]["prompt_logprobs"]
        assert found[0] is None
        assert found[1] == {
            "98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "65": {"logprob": -1.0, "rank": 1, "decoded_token": "A"},
        }
        assert len(found) == 3
        status, _ = await served.post("/v1/completions", {**TEXT, "prompt_logprobs": 1, "stream": True})
        assert status == 400


async def test_echo_streams_the_prompt_first(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("zz", EOS))) as served:
        events = await served.events("/v1/completions", {**TEXT, "echo": True, "logprobs": 0})
        texts = [e["choices"][0]["text"] for e in events[:-1]]
        assert "".join(texts) == "hellozz"
        tokens = [t for e in events[:-1] if e["choices"][0]["logprobs"] for t in e["choices"][0]["logprobs"]["tokens"]]
        assert tokens == [*"hellozz", "</s>"]
        offsets = [
            o for e in events[:-1] if e["choices"][0]["logprobs"] for o in e["choices"][0]["logprobs"]["text_offset"]
        ]
        assert offsets == [0, 1, 2, 3, 4, 5, 6, 7]
        _, whole = await served.post("/v1/completions", {**TEXT, "echo": True, "logprobs": 0})
        assert whole["choices"][0]["logprobs"]["tokens"] == tokens
        assert whole["choices"][0]["logprobs"]["text_offset"] == offsets


async def test_one_finish_per_choice(tmp_path: Path) -> None:
    """O07."""

    def script(submit: Submit) -> list[int]:
        return words("ab", EOS) if submit.params.choice == 0 else words("abcdefgh")

    async with serve(tmp_path, FakeEngine(script)) as served:
        body = {**CHAT, "n": 2, "max_tokens": 5, "stream_options": {"include_usage": True}}
        events = await served.events("/v1/chat/completions", body)
        assert events.count("[DONE]") == 1
        assert events[-1] == "[DONE]"
        chunks = [e for e in events if e != "[DONE]"]
        assert [c["choices"] for c in chunks].count([]) == 1
        finished: dict[int, str] = {}
        for chunk in chunks[:-1]:
            (choice,) = chunk["choices"]
            assert "finish_reason" in choice
            assert chunk["usage"] is None
            assert choice["index"] not in finished
            if choice["finish_reason"] is not None:
                finished[choice["index"]] = choice["finish_reason"]
        assert finished == {0: "stop", 1: "length"}
        usage = chunks[-1]["usage"]
        assert usage["completion_tokens"] == 8
        assert usage["prompt_tokens"] == len(b"user: hello\nassistant: ")
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_malformed_response_format_is_a_400(tmp_path: Path, path: str, stream: bool) -> None:
    """O14, but for json_object: it is refused by name while no grammar can keep its promise."""
    body = {**(CHAT if "chat" in path else TEXT), "stream": stream}
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for wanted in (
            {"type": "json_schema", "schema": {}},
            {"type": "json_schema", "json_schema": None},
            {"type": "xml"},
            {},
            {"type": "json_object"},
        ):
            status, answer = await served.post(path, {**body, "response_format": wanted})
            assert status == 400
            assert answer["error"]["type"] == "invalid_request_error"
            assert answer["error"]["param"].startswith("response_format")
        status, _, _ = await served.request("POST", path, {**body, "response_format": {"type": "text"}})
        assert status == 200


async def test_bad_logit_bias_is_a_400_and_nobody_else_notices(tmp_path: Path) -> None:
    """O15 at the edge: V = 300."""
    engine = FakeEngine(words("x" * 30, EOS), step_s=0.002)
    async with serve(tmp_path, engine) as served:
        other = asyncio.ensure_future(served.post("/v1/completions", {**TEXT, "max_tokens": 50}))
        for bias in ({"300": 1}, {"307": 1}, {"-1": 1}, {"abc": 1}, {"5": 101}):
            status, answer = await served.post("/v1/completions", {**TEXT, "logit_bias": bias})
            assert (status, answer["error"]["param"]) == (400, "logit_bias")
        assert (await other)[1]["choices"][0]["text"] == "x" * 30
        status, _ = await served.post("/v1/completions", {**TEXT, "logit_bias": {"299": 100}, "max_tokens": 1})
        assert status == 200
        submit = [message for message in engine.log if isinstance(message, Submit)][-1]
        assert submit.params.logit_bias == ((299, 100.0),)


async def test_unknown_and_null_fields_are_harmless(tmp_path: Path) -> None:
    """O16."""
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        body = {
            "model": "stub",
            "messages": [
                {"role": "developer", "content": "be brief", "id": 12, "opts": {"visible": False}},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            "frobnicate": 1,
            **dict.fromkeys(("functions", "tools", "stop", "logit_bias", "n", "user", "stream_options")),
        }
        status, headers, _ = await served.request("POST", "/v1/chat/completions", body)
        assert status == 200
        assert headers["x-ignored-fields"] == "frobnicate"
        assert prompt_of(engine) == "system: be brief\nuser: hi\nassistant: "
        status, answer = await served.post("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
        assert (status, answer["error"]["param"]) == (400, "stream_options")


async def test_running_usage_is_honest(tmp_path: Path) -> None:
    """O17."""
    async with serve(tmp_path, FakeEngine(words("x"))) as served:
        body = {
            "model": "stub",
            "prompt": "p" * 1000,
            "max_tokens": 1,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        events = [e for e in await served.events("/v1/completions", body) if e != "[DONE]"]
        assert all(e["usage"]["prompt_tokens"] == 1000 for e in events)
        counts = [e["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert events[0]["choices"][0]["text"] == "x"
        assert events[-1]["usage"]["total_tokens"] == 1001


@pytest.mark.parametrize("stream", [True, False])
async def test_clients_that_leave_free_their_rows(tmp_path: Path, stream: bool) -> None:
    """O21: nothing runs, nothing is counted twice, the next request is served."""
    engine = FakeEngine(words("a" * 400), step_s=0.001)
    async with serve(tmp_path, engine) as served:
        body = json.dumps({**TEXT, "max_tokens": 400, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"

        async def leave() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(head.encode() + body)
            if stream:
                await reader.readuntil(b"\n\n")
            else:
                await asyncio.sleep(0.03)
            writer.close()

        for _ in range(20):
            await leave()
        await asyncio.gather(*(leave() for _ in range(16)))
        await served.quiet()
        assert engine.rows == {}
        assert len(engine.aborted) == 36
        numbers = await served.numbers()
        assert numbers['trireme_requests_total{outcome="cancelled"}'] == 36
        assert numbers["trireme_streams_open"] == 0
        _, answer = await served.post("/v1/completions", {**TEXT, "max_tokens": 4})
        assert answer["choices"][0]["text"] == "aaaa"


async def test_every_request_is_counted_in_and_out(tmp_path: Path) -> None:
    engine = FakeEngine(words("abc", EOS))
    async with serve(tmp_path, engine) as served:
        await served.post("/v1/completions", TEXT)
        await served.events("/v1/chat/completions", {**CHAT, "n": 2})
        engine.refuses = "queue is full"
        assert (await served.post("/v1/completions", TEXT))[0] == 503
        engine.refuses = None
        assert (await served.post("/v1/completions", {**TEXT, "n": 0}))[0] == 400
        numbers = await served.numbers()
        assert numbers['trireme_requests_received_total{route="completions"}'] == 2
        assert numbers['trireme_requests_received_total{route="chat"}'] == 1
        assert numbers['trireme_requests_total{outcome="complete"}'] == 2
        assert numbers['trireme_requests_total{outcome="error"}'] == 1
        assert numbers['trireme_requests_refused_total{code="invalid_value"}'] == 1
        assert numbers["trireme_generation_tokens_total"] == 12
        assert numbers["trireme_time_to_first_token_seconds_count"] == 2
        assert numbers['trireme_engine_up{engine="0"}'] == 1


async def test_a_stream_goes_on_after_its_engine_has_started_again(tmp_path: Path) -> None:
    text = "abcdefghij" * 20
    engine = FakeEngine(lambda submit: words(text)[submit.num_replayed :], step_s=0.001)
    async with serve(tmp_path, engine) as served:
        stream = await served.openai.completions.create(**TEXT, max_tokens=200, stream=True)
        seen = (await anext(aiter(stream))).choices[0].text
        engine.die("killed")
        waiting = asyncio.ensure_future(served.openai.completions.create(**TEXT, max_tokens=10))
        await asyncio.sleep(0.05)
        engine.revive()
        async for chunk in stream:
            seen += chunk.choices[0].text
        assert seen == text
        assert (await waiting).choices[0].text == text[:10]
        assert (await waiting).usage.completion_tokens == 10  # type: ignore[union-attr]
        await served.quiet()
        assert served.front.own_snapshot().counters["trireme_moves"] == 1


async def test_who_leaves_while_waiting_for_an_engine_holds_no_place(tmp_path: Path) -> None:
    engine = FakeEngine(words("a" * 400))
    async with serve(tmp_path, engine) as served:
        await served.openai.completions.create(**TEXT, max_tokens=2)
        engine.die("killed")
        with pytest.raises(openai.APITimeoutError):
            await served.openai.completions.create(**TEXT, max_tokens=2, timeout=0.1)
        await served.quiet()
        assert served.front.num_inside == 0
        assert served.front.own_snapshot().counters["trireme_requests|cancelled"] >= 1


async def test_an_engine_that_does_not_come_back_is_an_error_event(tmp_path: Path) -> None:
    engine = FakeEngine(words("a" * 400), step_s=0.001)
    async with serve(tmp_path, engine, engine_wait=0.1) as served:
        stream = await served.openai.completions.create(**TEXT, max_tokens=400, stream=True)
        await anext(aiter(stream))
        engine.die("worker 0 was killed")
        with pytest.raises(openai.APIError, match="worker 0 was killed") as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_dead"
        await served.quiet()
        with pytest.raises(openai.InternalServerError) as refused:
            await served.openai.completions.create(**TEXT)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "1"
        engine.revive()
        assert (await served.openai.completions.create(**TEXT, max_tokens=2)).choices[0].text == "aa"


async def test_first_error_of_a_stream_is_a_plain_error(tmp_path: Path) -> None:
    engine = FakeEngine(words("a"))
    engine.refuses = "256 requests are queued already"
    async with serve(tmp_path, engine) as served:
        status, headers, body = await served.request("POST", "/v1/completions", {**TEXT, "stream": True})
        assert status == 503
        assert headers["retry-after"] == "1"
        assert json.loads(body)["error"]["code"] == "overloaded"


async def test_chat_logprobs(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("\u017d", EOS))) as served:
        whole = await served.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
        scores = whole.choices[0].logprobs
        assert scores is not None
        assert scores.content is not None
        assert [entry.token for entry in scores.content] == ["\ufffd", "\ufffd", "</s>"]
        assert scores.content[0].bytes == [0xC5]
        assert [top.token for top in scores.content[0].top_logprobs] == ["A", "B"]
        stream = await served.openai.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, stream=True)
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
        assert [(e.token, e.logprob, e.bytes) for e in streamed] == [
            (e.token, e.logprob, e.bytes) for e in scores.content
        ]
        status, answer = await served.post("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21})
        assert (status, answer["error"]["param"]) == (400, "top_logprobs")


async def test_prompts_in_every_form(tmp_path: Path) -> None:
    engine = FakeEngine(lambda submit: [*submit.prompt.tolist(), EOS])
    async with serve(tmp_path, engine) as served:
        for prompt in ("ab", ["ab", "cd"], words("ab"), [words("ab"), words("cd")]):
            answer = await served.openai.completions.create(model="stub", prompt=prompt, max_tokens=9, n=2)
            texts = [choice.text for choice in answer.choices]
            assert texts in (["ab", "ab"], ["ab", "ab", "cd", "cd"])
            assert [choice.index for choice in answer.choices] == list(range(len(texts)))
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(texts)
        for bad in ([-1], [300], [2**31], [2**70], [[1], [300]], "", [[]]):
            status, answer = await served.post("/v1/completions", {"model": "stub", "prompt": bad})
            assert status == 400
            assert answer["error"]["param"].startswith("prompt")


async def test_sampling_fields_reach_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        body = {
            **TEXT,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": -7,
            "frequency_penalty": 1,
            "presence_penalty": -1,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 1,
            "max_tokens": 9,
            "stop_token_ids": [33],
            "bad_words": ["no"],
            "allowed_token_ids": [120, 257],
            "cache_salt": "tenant",
            "priority": 3,
            "logprobs": 4,
            "n": 2,
        }
        await served.post("/v1/completions", body)
        first, second = [message for message in engine.log if isinstance(message, Submit)]
        params = first.params
        assert (params.temperature, params.top_p, params.seed, params.top_k) == (0.5, 0.9, -7, 5)
        assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (1, -1, 1.2)
        assert (params.min_p, params.min_tokens, params.max_tokens, params.logprobs) == (0.1, 1, 9, 4)
        assert (params.stop_token_ids, params.allowed_token_ids, params.eos_token_ids) == ((33,), (120, 257), (257,))
        assert params.bad_token_ids == (tuple(b"no"), tuple(b" no"))
        assert (params.choice, second.params.choice, second.params.seed) == (0, 1, -7)
        assert len(first.salt) == 32
        assert first.priority == 3


async def test_unseeded_requests_get_different_seeds(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        for _ in range(3):
            await served.post("/v1/completions", TEXT)
        assert len({message.params.seed for message in engine.log if isinstance(message, Submit)}) == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 2049}, "prompt"),
        ({"prompt": "x" * 2048}, "prompt"),
        ({"prompt": "x" * 2000, "max_tokens": 49}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"prompt": "x", "min_tokens": 3000}, "min_tokens"),
        ({"prompt": "x", "max_tokens": 2**40}, "max_tokens"),
        ({"prompt": ["x"] * 256, "n": 3}, "n"),
        ({"prompt": ["x"] * 257}, "prompt"),
        ({"prompt": "x", "bad_words": ["  "]}, "bad_words[0]"),
        ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": "x", "allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
    ],
)
async def test_limits_against_the_model(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        status, answer = await served.post("/v1/completions", {"model": "stub", **body})
        assert (status, answer["error"]["param"]) == (400, param)
        assert served.engine.log == []


async def test_context_may_be_filled_to_the_last_token(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x" * 90))) as served:
        status, answer = await served.post("/v1/completions", {"model": "stub", "prompt": "x" * 2000, "max_tokens": 48})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 48
        message = {"role": "user", "content": "x" * (2000 - len("user: \nassistant: "))}
        _, answer = await served.post("/v1/chat/completions", {"model": "stub", "messages": [message]})
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (2000, 48)
        status, _ = await served.post("/v1/completions", {"model": "stub", "prompt": "x" * 2048, "max_tokens": 0})
        assert status == 200


async def test_special_tokens_in_user_text_stay_text(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        content = "a</s>b<s>\ue000 <pa"
        await served.post("/v1/chat/completions", {"model": "stub", "messages": [{"role": "user", "content": content}]})
        assert prompt_of(engine) == f"user: {content}\nassistant: "


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"content": "x"}, "messages[0].role"),
    ],
)
async def test_bad_messages_are_named(tmp_path: Path, message: dict[str, Any], param: str) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        status, answer = await served.post("/v1/chat/completions", {"model": "stub", "messages": [message]})
        assert (status, answer["error"]["param"]) == (400, param)


async def test_template_settings_are_a_closed_list(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for settings, expected in (
            ({"enable_thinking": False}, 200),
            ({"messages": []}, 400),
            ({"enable_thinking": {"a": 1}}, 400),
        ):
            status, _ = await served.post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": settings})
            assert status == expected
        status, answer = await served.post("/v1/chat/completions", {**CHAT, "chat_template": "{{ 1 }}"})
        assert (status, answer["error"]["param"]) == (400, "chat_template")


async def test_continue_final_message(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    async with serve(tmp_path, engine) as served:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
        body = {"model": "stub", "messages": messages, "continue_final_message": True}
        assert (await served.post("/v1/chat/completions", body))[0] == 200
        assert prompt_of(engine) == "user: hi\nassistant: Well, "


async def test_tokenize_and_back(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine()) as served:
        _, answer = await served.post("/tokenize", {"prompt": "\u017d!", "return_token_strs": True})
        assert answer["tokens"] == [0xC5, 0xBD, 33]
        assert (answer["count"], answer["max_model_len"], answer["token_strs"][2]) == (3, 2048, "!")
        _, back = await served.post("/detokenize", {"tokens": answer["tokens"]})
        assert back["prompt"] == "\u017d!"
        _, chat = await served.post("/tokenize", {"messages": CHAT["messages"]})
        assert bytes(chat["tokens"]) == b"user: hello\nassistant: "
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "a", "messages": []}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**9]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            assert (await served.post(path, body))[0] == 400


async def test_models(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        models = [model async for model in served.openai.models.list()]
        assert [model.id for model in models] == ["stub"]
        assert (await served.openai.models.retrieve("stub")).id == "stub"
        with pytest.raises(openai.NotFoundError):
            await served.openai.models.retrieve("other/model")
        with pytest.raises(openai.NotFoundError):
            await served.openai.completions.create(model="other", prompt="x")


async def test_rank_header_pins_an_engine(tmp_path: Path) -> None:
    engines = FakeEngine(words("a", EOS), index=0), FakeEngine(words("b", EOS), index=1)
    async with serve(tmp_path, *engines) as served:
        for rank, text in ((0, "a"), (1, "b"), (1, "b"), (0, "a")):
            _, answer = await served.post("/v1/completions", TEXT, **{"x-data-parallel-rank": str(rank)})
            assert answer["choices"][0]["text"] == text
        assert (await served.post("/v1/completions", TEXT, **{"x-data-parallel-rank": "2"}))[0] == 404
        assert (await served.post("/v1/completions", TEXT, **{"x-data-parallel-rank": "-1"}))[0] == 400


async def test_load_tells_balancers_what_every_engine_has_to_do(tmp_path: Path) -> None:
    engines = FakeEngine(words("a", EOS), index=0), FakeEngine(words("b", EOS), index=1)
    async with serve(tmp_path, *engines) as served:
        assert (await served.request("GET", "/ready"))[0] == 200
        engines[1].die()
        status, _, body = await served.request("GET", "/load")
        answer = json.loads(body)
        assert (status, answer["status"], answer["num_rows"]) == (200, "degraded", 0)
        first, second = answer["engines"]
        assert (first["engine"], first["state"], first["num_running"], first["num_waiting"]) == (0, "ready", 0, 0)
        assert second == {"engine": 1, "state": "down"}


async def test_label_header_is_bounded(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("a", EOS))) as served:
        assert (await served.post("/v1/completions", TEXT, **{"x-trireme-label": "rack-a"}))[0] == 200
        status, refused = await served.post("/v1/completions", TEXT, **{"x-trireme-label": "a" * 65})
        assert (status, refused["error"]["param"]) == (400, "x-trireme-label")


async def test_ready_tells_the_truth(tmp_path: Path) -> None:
    engine = FakeEngine(words("x", EOS))
    engine.is_up = False
    async with serve(tmp_path, engine) as served:
        served.front.progress["engine-0"] = {"phase": "weights", "done": 1, "total": 4}
        status, _, body = await served.request("GET", "/ready")
        assert status == 503
        answer = json.loads(body)
        assert answer["status"] == "loading"
        assert answer["progress"] == [{"source": "engine-0", "phase": "weights", "done": 1, "total": 4}]
        assert (await served.request("GET", "/health"))[0] == 200
        assert (await served.request("GET", "/startup"))[0] == 503
        status, refused = await served.post("/v1/completions", TEXT)
        assert status == 503
        assert "loading" in refused["error"]["message"]
        engine.revive()
        assert (await served.request("GET", "/ready"))[0] == 200
        engine.die()
        status, _, body = await served.request("GET", "/ready")
        assert (status, json.loads(body)["status"]) == (503, "down")
        engine.revive()
        served.front.is_draining = True
        status, _, body = await served.request("GET", "/ready")
        assert (status, json.loads(body)["status"]) == (503, "draining")
        assert (await served.request("GET", "/live"))[0] == 200
        assert (await served.post("/v1/completions", TEXT))[0] == 200
        served.front.is_refusing = True
        status, headers, _ = await served.request("POST", "/v1/completions", TEXT)
        assert (status, headers["retry-after"]) == (503, "5")


async def test_a_stuck_engine_is_not_ready(tmp_path: Path) -> None:
    engine = FakeEngine(words("x" * 99))
    async with serve(tmp_path, engine) as served:
        engine.hold.clear()
        waiting = asyncio.ensure_future(served.post("/v1/completions", TEXT))
        await asyncio.sleep(0.05)
        assert (await served.request("GET", "/ready"))[0] == 200
        engine.stalled = "engine-0.worker-1 is stopped"
        status, _, body = await served.request("GET", "/ready")
        assert (status, json.loads(body)["status"]) == (503, "stuck")
        assert json.loads(body)["engines"][0]["stalled"] == "engine-0.worker-1 is stopped"
        engine.stalled, engine.silent_s = "", 1.5
        status, _, body = await served.request("GET", "/ready")
        assert (status, json.loads(body)["status"]) == (503, "stuck")
        assert "not answered for 1.5 s" in json.loads(body)["engines"][0]["stalled"]
        engine.silent_s = 0.0
        engine.hold.set()
        await waiting
        assert (await served.request("GET", "/ready"))[0] == 200


async def test_full_house_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    engine = FakeEngine(words("x" * 99), max_num_seqs=1, max_waiting=1)
    async with serve(tmp_path, engine) as served:
        engine.hold.clear()
        waiting = [asyncio.ensure_future(served.post("/v1/completions", {**TEXT, "max_tokens": 2})) for _ in range(2)]
        await asyncio.sleep(0.05)
        status, headers, body = await served.request("POST", "/v1/completions", raw=b"not even json")
        assert status == 503
        assert json.loads(body)["error"]["code"] == "overloaded"
        assert "retry-after" in headers
        status, _ = await served.post("/v1/completions", {**TEXT, "n": 2})
        assert status == 503
        engine.hold.set()
        assert [(await one)[0] for one in waiting] == [200, 200]
        status, answer = await served.post("/v1/completions", {**TEXT, "n": 2})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


def test_the_synchronous_client_works_too(tmp_path: Path) -> None:
    """The official client from an ordinary thread, while the server runs in its own loop."""
    ready: threading.Event = threading.Event()
    done: threading.Event = threading.Event()
    url: list[str] = []

    async def run() -> None:
        async with serve(tmp_path, FakeEngine(words("hello", EOS))) as served:
            url.append(served.url)
            ready.set()
            while not done.is_set():
                await asyncio.sleep(0.01)

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(10)
        with openai.OpenAI(base_url=url[0] + "/v1", api_key="x", max_retries=0) as client:
            whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
            assert whole.choices[0].message.content == "hello"
            stream = client.chat.completions.create(**CHAT, stream=True)  # type: ignore[call-overload]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
    finally:
        done.set()
        thread.join(10)

"""What clients branch on: error codes, refusals by name, defaults, numbers as other servers take them, methods."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import serve
from tests.serving.engines import FakeEngine, words
from trireme.errors import RequestError
from trireme.params import MAX_CHOICES
from trireme.serving.api.openai import unsupported, wire

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "hi"}]
# the context of the stub is 2048 tokens; a prompt of bytes has a token for each
OVER_THE_CONTEXT: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": "x" * 2049}, "prompt"),
    (TEXT, {"prompt": ["x", "x" * 2049]}, "prompt[1]"),
    (TEXT, {"prompt": [5] * 2049}, "prompt"),
    (TEXT, {"prompt": "x" * (2048 * 256 + 1)}, "prompt"),
    (TEXT, {"prompt": "x" * 2048}, "prompt"),
    (TEXT, {"prompt": "x", "max_tokens": 2048}, "max_tokens"),
    (TEXT, {"prompt": "x", "max_completion_tokens": 2048}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 2049}]}, "messages"),
    (CHAT, {"messages": TALK, "max_tokens": 2048}, "max_tokens"),
    (CHAT, {"messages": TALK, "max_completion_tokens": 2048}, "max_completion_tokens"),
]


async def test_more_than_the_context_has_its_code(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for path, fields, param in OVER_THE_CONTEXT:
            status, answer = await served.post(path, fields)
            error = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param), fields.keys()
            assert "maximum context length is 2048 tokens" in error["message"]
            assert error["type"] == "invalid_request_error"
        assert served.engine.log == []
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(model="stub", messages=TALK, max_completion_tokens=4000)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_completion_tokens")
        assert "max_tokens" not in caught.value.message


async def test_what_an_engine_finds_too_long_has_the_code_too(tmp_path: Path) -> None:
    """Where engines have other limits than the front end has heard of."""
    engine = FakeEngine()
    engine.refuses, engine.refusal_code = "maximum context length is 100 tokens", "context_length_exceeded"
    async with serve(tmp_path, engine) as served:
        status, answer = await served.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_unknown_model_has_its_code(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for path, fields in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": TALK}), ("/tokenize", {"prompt": "x"})):
            status, answer = await served.post(path, {"model": "gpt-9", **fields})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as caught:
            await served.openai.models.retrieve("gpt-9")
        assert caught.value.code == "model_not_found"
        assert (await served.post("/v1/nothing", {}))[1]["error"]["code"] == "not_found"


async def test_a_text_completion_has_sixteen_tokens_unless_told(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x" * 90))) as served:

        async def length(path: str, fields: dict[str, Any]) -> int:
            _, answer = await served.post(path, fields)
            return int(answer["usage"]["completion_tokens"])

        assert await length(TEXT, {"prompt": "x"}) == 16
        assert await length(TEXT, {"prompt": "x", "min_tokens": 20}) == 20
        assert await length(TEXT, {"prompt": "x" * 2040}) == 8
        assert await length(TEXT, {"prompt": "x", "max_completion_tokens": 20}) == 20
        assert await length(TEXT, {"prompt": "x", "max_tokens": 5, "max_completion_tokens": 20}) == 20
        assert await length(CHAT, {"messages": TALK, "max_completion_tokens": 40, "max_tokens": 5}) == 40
    async with serve(tmp_path, FakeEngine(words("x" * 90)), default_max_tokens=30) as served:
        for path, fields in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": TALK})):
            _, answer = await served.post(path, fields)
            assert answer["usage"]["completion_tokens"] == 30


# ---------------------------------------------------------------- refusals by name

CONSTRAINED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "json_schema")
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: empty}) for path in (CHAT, TEXT) for name in CONSTRAINED for empty in ({}, [], "", "a+", 0)),
    *((path, {name: "x"}) for path in (CHAT, TEXT) for name in ("regex", "ebnf", "structural_tag", "stop_regex")),
    *((path, {"truncate_prompt_tokens": 1}) for path in (CHAT, TEXT)),
    *(
        (path, {name: {}})
        for path in (CHAT, TEXT)
        for name in ("kv_transfer_params", "web_search_options")[: 2 - (path == TEXT)]
    ),
    *((path, {name: "x"}) for path in (CHAT, TEXT) for name in ("prompt_embeds", "lora", "lora_path", "chat_template")),
    *((path, {name: ["x"]}) for path in (CHAT, TEXT) for name in ("logits_processors", "documents", "samplers")),
    *(
        (path, {name: 0.5})
        for path in (CHAT, TEXT)
        for name in ("typical_p", "repeat_penalty", "tfs_z", "xtc_probability")
    ),
    *((path, {name: True}) for path in (CHAT, TEXT) for name in ("speculative", "return_hidden_states")),
    *((path, {name: 3}) for path in (CHAT, TEXT) for name in ("max_new_tokens", "n_predict", "mirostat", "num_beams")),
    *((path, {"tools": [{}]}) for path in (CHAT, TEXT)),
    *((path, {"functions": [{}]}) for path in (CHAT, TEXT)),
    *((path, {"tool_choice": choice}) for path in (CHAT, TEXT) for choice in ("auto", "required", "banana", {"a": 1})),
    *((path, {"tools": [], "tool_choice": "auto"}) for path in (CHAT,)),
    *((path, {"function_call": choice}) for path in (CHAT, TEXT) for choice in ("auto", {"name": "f"})),
    *((path, {"service_tier": "bogus"}) for path in (CHAT, TEXT)),
    *((path, {"n": wrong}) for path in (CHAT, TEXT) for wrong in (0, -1, MAX_CHOICES + 1)),
    (CHAT, {"echo": True}),
    (CHAT, {"add_special_tokens": True}),
    (CHAT, {"prompt": "x"}),
    (CHAT, {"audio": {}}),
    (CHAT, {"suffix": "x"}),
    (TEXT, {"messages": []}),
    (TEXT, {"reasoning_effort": "low"}),
    (TEXT, {"top_logprobs": 3}),
    (TEXT, {"suffix": "x"}),
    (TEXT, {"chat_template_kwargs": {"thinking": True}}),
]
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *((path, {name: None}) for path in (CHAT, TEXT) for name in sorted(unsupported.GENERATION)),
    *((path, {name: None}) for path in (CHAT, TEXT) for name in sorted(unsupported.CALL_FIELDS)),
    *((path, {name: "none"}) for path in (CHAT, TEXT) for name in ("tool_choice", "function_call")),
    *((path, {"tools": [{}], "tool_choice": "none"}) for path in (CHAT, TEXT)),
    *((path, {"functions": [{}], "function_call": "none"}) for path in (CHAT, TEXT)),
    *((path, {"tools": [], "documents": [], "typical_p": 1.0, "repeat_penalty": 1}) for path in (CHAT, TEXT)),
    *((path, {"service_tier": tier}) for path in (CHAT, TEXT) for tier in wire.SERVICE_TIERS),
    (CHAT, {"echo": False, "suffix": "", "add_special_tokens": False}),
    (TEXT, {"suffix": "", "top_logprobs": 0, "chat_template_kwargs": {}}),
]


def checked(path: str, fields: dict[str, Any]) -> list[str]:
    """Parses and checks a request with these fields; the names that were ignored."""
    kind = wire.ChatRequest if path == CHAT else wire.CompletionRequest
    needed = {"messages": TALK} if path == CHAT else {"prompt": "x"}
    request, ignored = wire.parse(json.dumps({**needed, **fields}).encode(), kind)  # type: ignore[type-var]
    wire.sampling_params(request, max_tokens=None, logprobs=None, prompt_logprobs=None)
    return ignored


@pytest.mark.parametrize(("path", "fields"), REFUSED, ids=str)
def test_what_would_change_the_answer_is_refused_by_name(path: str, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        checked(path, fields)
    name = [*fields][-1]
    assert caught.value.param == name
    assert name in caught.value.message


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=str)
def test_what_asks_for_nothing_is_accepted_in_silence(path: str, fields: dict[str, Any]) -> None:
    assert checked(path, fields) == []


@pytest.mark.parametrize(("path", "table"), [(CHAT, unsupported.CHAT), (TEXT, unsupported.COMPLETIONS)])
def test_every_field_of_the_tables_is_refused_unless_neutral(
    path: str, table: Mapping[str, unsupported.RefusedField]
) -> None:
    for name, known in table.items():
        for value in (None, *known.neutral):
            assert checked(path, {name: value}) == [], name
        for value in ({"x": 1}, ["x" * 100], "y" * 100, 77):
            with pytest.raises(RequestError) as caught:
                checked(path, {name: value})
            assert caught.value.param == name


async def test_refusals_reach_the_client_as_400(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for path, fields in ((CHAT, {"messages": TALK}), (TEXT, {"prompt": "x"})):
            for stream in (False, True):
                body = {**fields, "guided_json": {}, "stream": stream}
                status, answer = await served.post(path, body)
                assert (status, answer["error"]["param"]) == (400, "guided_json")
        with pytest.raises(openai.BadRequestError) as caught:
            await served.openai.chat.completions.create(model="stub", messages=TALK, tool_choice="required")  # type: ignore[call-overload]
        assert caught.value.param == "tool_choice"
        assert served.engine.log == []


async def test_choices_have_one_bound_for_all(tmp_path: Path) -> None:
    """The limit in the message is the one that holds, over HTTP as in Python."""
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        _, answer = await served.post(TEXT, {"prompt": "x", "n": 17})
        assert len(answer["choices"]) == 17
        for wrong in (0, MAX_CHOICES + 1):
            status, answer = await served.post(TEXT, {"prompt": "x", "n": wrong})
            assert (status, answer["error"]["message"]) == (
                400,
                f"n is {wrong}; it must be a whole number 1..{MAX_CHOICES}",
            )


# ---------------------------------------------------------------- values


async def test_whole_numbers_may_be_written_as_floats(tmp_path: Path) -> None:
    engine = FakeEngine(words("x" * 90))
    async with serve(tmp_path, engine) as served:
        for written in (b"2.0", b"2e0", b"2.000"):
            raw = b'{"prompt": "x\\u00e9", "seed": 7.0, "n": 1.0, "max_tokens": ' + written + b', "temperature": 1.0}'
            status, _, body = await served.request("POST", TEXT, raw=raw)
            assert status == 200, body
            assert json.loads(body)["usage"]["completion_tokens"] == 2
        status, answer = await served.post(CHAT, {"messages": TALK, "max_completion_tokens": 3.0, "top_k": -1.0})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
        for ids in ([97.0, 98.0], [[97.0], [98]]):
            status, answer = await served.post(TEXT, {"prompt": ids, "max_tokens": 1.0, "stop_token_ids": [5.0, 6]})
            assert (status, answer["usage"]["prompt_tokens"]) == (200, 2)
        assert (await served.post("/detokenize", {"tokens": [97.0, 98]}))[1]["prompt"] == "ab"
        for prompt in ([97.5], [97.0, "1.0"], [1e300], ["1.0", 1.0]):
            assert (await served.post(TEXT, {"prompt": prompt}))[0] == 400
        for name, value in (
            ("max_tokens", 2.5),
            ("max_tokens", 1e300),
            ("n", 0.0),
            ("seed", "7"),
            ("max_tokens", True),
        ):
            status, answer = await served.post(TEXT, {"prompt": "x", name: value})
            assert (status, answer["error"]["param"]) == (400, name), value


async def test_errors_name_the_length_as_it_was_written(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for path, fields in ((CHAT, {"messages": TALK}), (TEXT, {"prompt": "x"})):
            for wrong in (-1, 2.5, "x", True, 2**40, [], {}, 4000):
                status, answer = await served.post(path, {**fields, "max_completion_tokens": wrong})
                assert (status, answer["error"]["param"]) == (400, "max_completion_tokens")
                assert "max_tokens" not in answer["error"]["message"]
            both = {**fields, "max_completion_tokens": 2, "min_tokens": 3}
            status, answer = await served.post(path, both)
            assert (status, answer["error"]["param"]) == (400, "min_tokens")
            assert answer["error"]["message"] == "min_tokens is 3, above max_completion_tokens 2"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (rb'{"prompt": "\ud83d"}', "prompt"),
        (rb'{"prompt": "a\ud800b", "max_tokens": 1}', "prompt"),
        (rb'{"prompt": "x", "stop": ["a", "\udc00"]}', "stop[1]"),
        (rb'{"messages": [{"role": "user", "content": "a\ud83d"}]}', "messages[0].content"),
        (rb'{"messages": [{"content": [{"text": "\\\ud83d\ud83d"}]}]}', "messages[0].content[0].text"),
        (rb'{"a": "\ud83d\ude00 \uDE00", "b": "\ud83d"}', "a"),
        (rb'{"\ud83d": 1}', None),
    ],
)
def test_half_a_surrogate_pair_is_said_to_be_one(body: bytes, path: str | None) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair") as caught:
        wire.parse(body, wire.CompletionRequest)
    assert caught.value.param == path


@pytest.mark.parametrize(
    "body", [rb'{"prompt": "\ud83d\ude00"}', rb'{"prompt": "\\ud83d"}', rb'{"prompt": "\\\\udc00"}']
)
def test_whole_characters_are_no_halves(body: bytes) -> None:
    wire.parse(body, wire.CompletionRequest)
    for wrong in (b"", b"{", body[:-1], body[:-2], body.replace(b"}", b', "user": "\xff"}')):
        with pytest.raises(RequestError) as caught:
            wire.parse(wrong, wire.CompletionRequest)
        assert "surrogate" not in caught.value.message


def test_the_second_look_is_quick_however_large_the_body() -> None:
    """Processor time, of bodies as large as the default limit takes; a first look takes about as long."""
    for body in (
        b'{"prompt":"' + rb"\n" * 4_000_000 + b'"',
        b'{"prompt":"' + rb"\\" * 4_000_000,
        b'{"prompt":"' + rb"\ud83d" * 1_300_000 + b'"}',
        b'{"prompt":[' + b"1.0," * 2_000_000 + b"2.5]}",
        b'{"n":1.0,"stop_token_ids":[' + b"1.0," * 2_000_000 + b"2.5]}",
    ):
        began = time.process_time()
        with pytest.raises(RequestError):
            wire.parse(body, wire.CompletionRequest)
        assert time.process_time() - began < 0.5, body[:30]


PARTS: list[tuple[dict[str, Any], str, str]] = [
    ({"type": "text", "text": None}, "text", "messages[0].content[0].text is null; it must be a string"),
    ({"type": "text"}, "text", "messages[0].content[0].text is required"),
    ({"type": "input_text", "text": 5}, "text", "messages[0].content[0].text is 5; it must be a string"),
    ({"type": "refusal", "refusal": None}, "refusal", "messages[0].content[0].refusal is null; it must be a string"),
    ({"text": "x"}, "type", "messages[0].content[0].type is required"),
    ({"type": "image_url"}, "type", "messages[0].content[0] has the type 'image_url'"),
]


async def test_a_part_without_its_text_says_so(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for part, field, message in PARTS:
            status, answer = await served.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
            assert (status, answer["error"]["param"]) == (400, f"messages[0].content[0].{field}")
            assert message in answer["error"]["message"]


async def test_tokens_are_named_by_id_on_request(tmp_path: Path) -> None:
    """Exact where the texts of several tokens are alike (half characters)."""
    async with serve(tmp_path, FakeEngine(words("\u00e9", EOS))) as served:
        fields = {"return_tokens_as_token_ids": True, "max_tokens": 2}
        _, answer = await served.post(TEXT, {"prompt": "x", "logprobs": 1, "echo": True, **fields})
        scores = answer["choices"][0]["logprobs"]
        assert scores["tokens"] == ["token_id:120", "token_id:195", "token_id:169"]
        assert all(name.startswith("token_id:") for name in scores["top_logprobs"][1])
        _, answer = await served.post(CHAT, {"messages": TALK, "logprobs": True, "top_logprobs": 1, **fields})
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["token_id:195", "token_id:169"]
        assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9]]
        assert content[0]["top_logprobs"][0]["token"].startswith("token_id:")


# ---------------------------------------------------------------- methods


async def test_methods_are_told(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("x", EOS))) as served:
        for path, allow in (
            (TEXT, "POST, OPTIONS"),
            ("/v1/models", "GET, HEAD, OPTIONS"),
            ("/health", "GET, HEAD, OPTIONS"),
        ):
            status, headers, body = await served.request("DELETE", path)
            assert (status, headers["allow"]) == (405, allow)
            assert json.loads(body)["error"]["code"] == "method_not_allowed"
            status, headers, body = await served.request("OPTIONS", path)
            assert (status, headers["allow"], body) == (204, allow, b"")
        status, headers, _ = await served.request("OPTIONS", "*")
        assert (status, headers["allow"]) == (204, "GET, HEAD, POST, OPTIONS")
        assert (await served.request("OPTIONS", "/nothing"))[0] == 404

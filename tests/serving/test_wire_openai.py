"""Validation of requests is total: every bad field is a RequestError that names it; nothing else escapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.errors import EngineDeadError, OverloadedError, RequestError
from trireme.serving.api.openai import wire
from trireme.serving.http import errors


def completion(**fields: Any) -> wire.CompletionRequest:
    request, _ = wire.parse(json.dumps({"prompt": "x", **fields}).encode(), wire.CompletionRequest)
    return request


def refused(**fields: Any) -> RequestError:
    """The error that these fields of a completion request give."""
    try:
        params = wire.sampling_params(completion(**fields), max_tokens=None, logprobs=None, prompt_logprobs=None)
    except RequestError as error:
        return error
    raise AssertionError(f"accepted: {params}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"stop": ""}, "stop[0]"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a" * 257]}, "stop[0]"),
        ({"stop": [1]}, "stop[0]"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"user": "x" * 129}, "user"),
        ({"cache_salt": "\u4f60" * 43}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": None}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["x"] * 1000}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert error.status == 400
    assert len(error.message) < 300


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e309}',
        b'{"prompt": "x", "logit_bias": {"1": 1e999}}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": [1.5]}',
        b'{"prompt": [[1, "a"]]}',
        b'{"prompt": {"a": 1}}',
        b'{"prompt": null}',
        b"{}",
    ],
)
def test_malformed_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        wire.parse(body, wire.CompletionRequest)


def test_missing_fields_are_named_with_their_path() -> None:
    with pytest.raises(RequestError) as caught:
        wire.parse(b'{"messages": [{"role": "user"}, {"content": "x"}]}', wire.ChatRequest)
    assert caught.value.param == "messages[1].role"
    with pytest.raises(RequestError) as caught:
        wire.parse(b"{}", wire.ChatRequest)
    assert caught.value.param == "messages"


def test_depth_is_limited_before_anything_is_built() -> None:
    deep = b'{"prompt": "x", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(RequestError, match="nested"):
        wire.parse(deep, wire.CompletionRequest)
    wire.parse(b'{"prompt": "x", "metadata": ' + b"[" * 60 + b"]" * 60 + b"}", wire.CompletionRequest)


def test_brackets_inside_strings_do_not_count() -> None:
    text = '[{"' * 100 + "\\" + '"\\\\' + "{" * 300
    request, _ = wire.parse(json.dumps({"prompt": text}).encode(), wire.CompletionRequest)
    assert request.prompt == text
    wire.check_depth(json.dumps([[1, 2], [3]] * 500).encode())


@given(st.recursive(st.one_of(st.none(), st.text(alphabet='[]{}"\\a')), lambda inner: st.lists(inner, max_size=3)))
def test_depth_check_accepts_every_shallow_document(value: Any) -> None:
    wire.check_depth(json.dumps(value).encode())


def test_unknown_and_null_fields() -> None:
    """O16: unknown fields are ignored and listed; null means absent."""
    body = {
        "messages": [{"role": "user", "content": "hi", "id": 12, "opts": {"visible": False}}],
        "frobnicate": 1,
        "user": "u",
        "metadata": {"a": 1},
        **dict.fromkeys(("functions", "tools", "stop", "logit_bias", "n", "stream_options"), None),
    }
    request, unknown = wire.parse(json.dumps(body).encode(), wire.ChatRequest)
    assert unknown == ["frobnicate"]
    params = wire.sampling_params(request, max_tokens=5, logprobs=None, prompt_logprobs=None)
    assert (params.n, params.stop, params.logit_bias) == (1, (), None)


def test_empty_stop_list_is_no_stop() -> None:
    """O03."""
    params = wire.sampling_params(completion(stop=[]), max_tokens=5, logprobs=None, prompt_logprobs=None)
    assert params.stop == ()
    assert not params.ignore_eos


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), ([[]], 1), ("", 1)]
)
def test_prompt_shapes(prompt: Any, count: int) -> None:
    assert len(wire.split_prompts(prompt)) == count


@pytest.mark.parametrize("prompt", [[], ["a", 1], [1, "a"], [[1], "a"], [[1], 2], ["a"] * 257])
def test_bad_prompt_shapes(prompt: Any) -> None:
    with pytest.raises(RequestError) as caught:
        wire.split_prompts(prompt)
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


def test_tools_are_refused_unless_switched_off() -> None:
    for fields, accepted in (
        ({"tools": [{}]}, False),
        ({"tools": [{}], "tool_choice": "none"}, True),
        ({"tools": []}, True),
    ):
        body = json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode()
        if accepted:
            wire.parse(body, wire.ChatRequest)
        else:
            with pytest.raises(RequestError, match="tools"):
                wire.parse(body, wire.ChatRequest)


def test_errors_have_one_form_and_keep_secrets() -> None:
    shown = errors.error_object(RequestError("n is 0", param="n"))
    assert shown == {"message": "n is 0", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    hidden = errors.error_object(RuntimeError("/secret/path at 0x7f00"), "req-1")
    assert "secret" not in json.dumps(hidden)
    assert "req-1" in hidden["message"]
    assert errors.error_status(RuntimeError()) == 500
    assert errors.retry_after(OverloadedError("full", retry_after_s=2)) == 2
    assert errors.retry_after(EngineDeadError("dead")) == 1
    assert errors.retry_after(RequestError("x")) is None


JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = sorted(wire.CompletionRequest.__struct_fields__)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5), JSON)
def test_any_json_is_accepted_or_refused_by_name(fields: dict[str, Any], prompt: Any) -> None:
    try:
        request, _ = wire.parse(json.dumps({"prompt": prompt, **fields}).encode(), wire.CompletionRequest)
        wire.sampling_params(request, max_tokens=request.max_tokens, logprobs=request.logprobs, prompt_logprobs=None)
        wire.split_prompts(request.prompt)
    except RequestError as error:
        errors.error_body(error)

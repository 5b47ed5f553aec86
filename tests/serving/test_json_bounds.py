"""Large bodies are refused by the entries of their fields, before anything is built of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ContextLengthError, RequestError
from trireme.serving.api.openai import wire
from trireme.serving.text.json_bounds import MAX_ENTRIES, MAX_FIELDS, SMALL_BYTES, FieldBounds, check_entries

NUM_IDS = 100_000
IDS = [1] * NUM_IDS
BIAS = {str(token): 1 for token in range(NUM_IDS)}


def refusal(
    body: bytes | dict[str, Any], kind: type[Any] = wire.CompletionRequest, max_len: int = 4096
) -> RequestError:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert len(data) > SMALL_BYTES
    with pytest.raises(RequestError) as caught:
        wire.parse(data, kind, max_len=max_len)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "size", "limit"),
    [
        ({"logit_bias": BIAS}, "logit_bias", NUM_IDS, 1024),
        ({"stop": ["a,"] * NUM_IDS}, "stop", NUM_IDS, 16),
        ({"stop_token_ids": IDS}, "stop_token_ids", NUM_IDS, 1024),
        ({"bad_words": ["a"] * NUM_IDS}, "bad_words", NUM_IDS, 256),
        ({"guided_json": [{}] * NUM_IDS}, "guided_json", NUM_IDS, MAX_ENTRIES),
        ({"frobnicate": [[1, 2]] * NUM_IDS}, "frobnicate", 2 * NUM_IDS, MAX_ENTRIES),
        ({"allowed_token_ids": [1] * (1 << 20), "seed": 1}, None, 0, 0),
        ({"prompt": ["a"] * NUM_IDS}, "prompt", NUM_IDS, 256),
        ({"prompt": [[1]] * NUM_IDS}, "prompt", NUM_IDS, 256),
    ],
)
def test_a_field_with_too_much_is_named(fields: dict[str, Any], param: str | None, size: int, limit: int) -> None:
    body = {"prompt": "x", **fields}
    if param is None:
        wire.parse(json.dumps(body).encode(), wire.CompletionRequest)
        return
    error = refusal(body)
    assert error.param == param
    assert str(size) in error.message
    assert str(limit) in error.message


def test_more_ids_than_the_context_say_so() -> None:
    for kind, field in ((wire.CompletionRequest, "prompt"), (wire.DetokenizeRequest, "tokens")):
        error = refusal({field: IDS}, kind)
        assert isinstance(error, ContextLengthError)
        assert (error.code, error.param) == ("context_length_exceeded", field)
        assert str(NUM_IDS) in error.message
        assert "4096" in error.message
    several = json.dumps({"prompt": [[1] * 4096] * 20}).encode()
    assert len(wire.parse(several, wire.CompletionRequest, max_len=4096)[0].prompt) == 20


def test_a_field_that_comes_twice_does_not_hide_its_first() -> None:
    body = b'{"prompt": "x", "logit_bias": ' + json.dumps(BIAS).encode() + b', "logit_bias": {}}'
    assert "more than once" in refusal(body).message


def test_fields_at_the_top_are_counted() -> None:
    error = refusal({"prompt": "x", **{f"field{i}": 1 for i in range(NUM_IDS)}})
    assert str(MAX_FIELDS) in error.message


def test_messages_have_entries_for_all_their_parts() -> None:
    parts = [{"type": "text", "text": "a"}] * 2000
    request, _ = wire.parse(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), wire.ChatRequest)
    assert len(request.messages[0].content or ()) == 2000
    error = refusal({"messages": [{"role": "user", "content": parts * 40}]}, wire.ChatRequest)
    assert error.param == "messages"


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(alphabet='[]{}",:\\a\u00e9')),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(alphabet='",:\\{a'), inner, max_size=4)
    ),
    max_leaves=20,
)


def entries(value: Any) -> int:
    """Commas of a value, by building it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(0, len(inner) - 1) + sum(map(entries, inner))


@given(st.dictionaries(st.text(alphabet='",:\\{a'), VALUES, max_size=4), st.booleans())
def test_what_is_in_strings_does_not_count(body: dict[str, Any], escaped: bool) -> None:
    data = json.dumps(body, ensure_ascii=escaped).encode()
    most = {name: max(1, entries(value) + 1) for name, value in body.items()}
    check_entries(data, FieldBounds(most))
    for name, value in body.items():
        if entries(value):
            with pytest.raises(RequestError):
                check_entries(data, FieldBounds({**most, name: entries(value)}))

"""SamplingParams takes what Python callers write and refuses the rest with the field's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import RequestError
from trireme.params import SamplingParams


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"stop": "Paris"}, {"stop": ("Paris",)}),
        ({"stop": "\n\n"}, {"stop": ("\n\n",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None}, {"stop": ()}),
        ({"stop": []}, {"stop": ()}),
        ({"bad_words": "Paris"}, {"bad_words": ("Paris",)}),
        ({"bad_words": ["a"]}, {"bad_words": ("a",)}),
        ({"bad_words": None}, {"bad_words": ()}),
        ({"stop_token_ids": [28]}, {"stop_token_ids": (28,)}),
        ({"stop_token_ids": {28}}, {"stop_token_ids": (28,)}),
        ({"stop_token_ids": np.array([28, 29])}, {"stop_token_ids": (28, 29)}),
        ({"stop_token_ids": None}, {"stop_token_ids": ()}),
        ({"allowed_token_ids": range(3)}, {"allowed_token_ids": (0, 1, 2)}),
        ({"allowed_token_ids": [np.int64(5)]}, {"allowed_token_ids": (5,)}),
        ({"allowed_token_ids": None}, {"allowed_token_ids": None}),
        ({"logit_bias": {np.int32(3): 1, 4: -2.5}}, {"logit_bias": {3: 1, 4: -2.5}}),
        ({"logit_bias": None}, {"logit_bias": None}),
    ],
)
def test_series_of_any_kind_become_tuples(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    for name, value in expected.items():
        found = getattr(params, name)
        assert found == value
        assert type(found) is type(value)
        ids = found if name.endswith("ids") else name == "logit_bias" and found
        assert all(type(token) is int for token in ids or ())
    assert params == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stop": 5}, "stop"),
        ({"stop": b"x"}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"stop": ""}, "stop[0]"),
        ({"bad_words": [1]}, "bad_words[0]"),
        ({"bad_words": 1.5}, "bad_words"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [2**70]}, None),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": np.array([1.5])}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"logit_bias": {1.5: 1}}, "logit_bias"),
        ({"logit_bias": {True: 1}}, "logit_bias"),
        ({"logit_bias": {5: "1"}}, "logit_bias"),
        ({"logit_bias": {5: True}}, "logit_bias"),
        ({"logit_bias": {5: None}}, "logit_bias"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"logit_bias": {5: 10**400}}, "logit_bias"),
        ({"logit_bias": [1, 2]}, "logit_bias"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"ignore_eos": None}, "ignore_eos"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": float("nan")}, "top_p"),
        ({"n": 1.0}, "n"),
        ({"n": None}, "n"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": True}, "logprobs"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_wrong_types_are_refused_with_their_field(given: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**given).check_vocabulary(1000)
    field = next(iter(given))
    assert caught.value.param == (param or field)
    assert field in caught.value.message
    assert len(caught.value.message) < 300


ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner),
        st.dictionaries(st.one_of(st.integers(), st.text(max_size=3), st.floats()), inner, max_size=3),
    ),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING, max_size=4))
def test_nothing_but_request_errors_escape(fields: dict[str, Any]) -> None:
    params, fault = SamplingParams(), None
    try:
        params = SamplingParams(**fields)
    except RequestError as error:
        fault = error
    assert fault is None or fault.param
    assert all(type(text) is str for text in (*params.stop, *params.bad_words))
    assert all(type(token) is int for token in (*params.stop_token_ids, *(params.allowed_token_ids or ())))
    assert SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__}) == params

"""Converts values from Python callers to plain types: a str is one text, any other series becomes a tuple, ids become ints. Pure.

Called by trireme/params.py, serving/text/processor.py and launch (prompts). Every rejection is a RequestError that names the
field.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from trireme.errors import RequestError

_MAX_SHOWN = 60


def shown(value: Any) -> str:
    """`value` for an error message, truncated."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({type(value).__name__})"


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A str is one text, None is none."""
    if isinstance(value, str):
        return (value,)
    found = series(name, () if value is None else value, "a text or a list of texts")
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise RequestError(f"{name}[{i}] is {shown(text)}; it must be a text", param=f"{name}[{i}]")
    return found


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """A series of integers (numpy's included); None is none. Bools, floats and strings are rejected."""
    found = series(name, () if value is None else value, "a list of token ids")
    if set(map(type, found)) <= {int}:
        return found
    return tuple(_checked(f"{name}[{i}]", token) for i, token in enumerate(found))


def biases(name: str, value: Any) -> dict[int, float]:
    """Token id -> bias."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} is {shown(value)}; it must map token ids to numbers", param=name)
    found = {}
    for token, bias in value.items():
        if (known := _index(token)) is None:
            raise RequestError(f"{name} has the key {shown(token)}; keys are token ids", param=name)
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RequestError(f"{name} of token {known} is {shown(bias)}; it must be a number", param=name)
        found[known] = bias
    return found


def _checked(name: str, token: Any) -> int:
    if (known := _index(token)) is None:
        raise RequestError(f"{name} is {shown(token)}; it must be a token id", param=name)
    return known


def _index(value: Any) -> int | None:
    """An integer as an int; None for anything else, including a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def series(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Any iterable that is neither a string nor a mapping, as a tuple."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{name} is {shown(value)}; it must be {what}", param=name)
    return tuple(value)

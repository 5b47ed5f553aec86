"""A second look at a JSON body that the decoder refused: whole numbers written as 2.0, and half surrogate pairs.

Called by serving/api/openai/wire.py on that path only. Pure; never raises. What takes time for each value is done for small bodies
alone, as somebody may send the largest ones on purpose.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable
from typing import NamedTuple

import msgspec

SMALL_BYTES = 256 << 10
MAX_PATH = 4  # steps of a path: messages[0].content[1].text has that many below its name

_WHOLE_FLOAT = re.compile(rb"-?\d{1,15}(\.0+)?([eE]\+?\d)?")
_LISTED = re.compile(rb"(?<=[\[,\s])(-?\d{1,15})\.0+(?=[\],\s])")
_PLACE = re.compile(r"\(byte (\d+)\)")
_BEFORE, _AFTER = 14, 8  # bytes around the place of an error in which the escape is that it is about
_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"(?:%s)(?:%s)|(?P<half>%s|%s)" % (_HIGH, _LOW, _HIGH, _LOW))
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_array = msgspec.json.Decoder(list[msgspec.Raw])


class LoneSurrogate(NamedTuple):
    """Half of a surrogate pair in a string: the escape as written, and the path of the string where it is known."""

    escape: str
    path: str | None


def with_whole_numbers(body: bytes, names: Container[str]) -> bytes | None:
    """The same object with 2 for 2.0 in its top-level fields `names`, numbers or short lists of them; None where none is such."""
    try:
        raws = _object.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    whole = {name: _whole(bytes(raw)) for name, raw in raws.items() if name in names and len(bytes(raw)) <= SMALL_BYTES}
    changed = {name: msgspec.Raw(found) for name, found in whole.items() if found != bytes(raws[name])}
    return msgspec.json.encode({**raws, **changed}) if changed else None


def _whole(raw: bytes) -> bytes:
    """A number, or lists of numbers and nothing else, without the .0 of whole ones."""
    if raw[:1] == b"[" and b'"' not in raw:
        return _LISTED.sub(rb"\1", raw)
    return b"%d" % int(float(raw)) if _WHOLE_FLOAT.fullmatch(raw) else raw


def lone_surrogate(body: bytes, error: str) -> LoneSurrogate | None:
    """The escape that is half of a surrogate pair, if it is what the decoder's `error` is about."""
    place = _PLACE.search(error)
    at = int(place[1]) if place is not None else len(body)  # a body that ends too early for the second half
    start = max(0, at - _BEFORE)
    for found in _HALF.finditer(body, start, at + _AFTER):
        if found["half"] is not None and _is_escape(body, found.start()):
            mark = secrets.token_hex(3).encode()  # as long as the escape
            marked = body[: found.start()] + mark + body[found.end() :]
            return LoneSurrogate(found[0].decode(), _path_of(mark, marked) if len(body) <= SMALL_BYTES else None)
    return None


def _is_escape(body: bytes, at: int) -> bool:
    """Whether the backslash at `at` is not escaped by one before it."""
    head = body[:at]
    return (len(head) - len(head.rstrip(b"\\"))) % 2 == 0


def _path_of(mark: bytes, raw: bytes) -> str | None:
    """Where in the object `raw` the string is that holds `mark`."""
    raw = _HALF.sub(
        lambda found: found[0] if found["half"] is None else b"      ", raw
    )  # others would stop the decoder
    path = ""
    for _ in range(MAX_PATH + 1):
        step = next(((name, bytes(child)) for name, child in _children(raw) if mark in bytes(child)), None)
        if step is None:
            break
        path, raw = f"{path}[{step[0]}]" if isinstance(step[0], int) else f"{path}.{step[0][:40]}", step[1]
    return path.lstrip(".") or None


def _children(raw: bytes) -> Iterable[tuple[str | int, msgspec.Raw]]:
    try:
        return enumerate(_array.decode(raw)) if raw[:1] == b"[" else _object.decode(raw).items()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()

"""How large the parts of a JSON body may be, told from its commas and brackets before anything of it is built.

Called by serving/api/openai/wire.py and serving/text/chat_prompt.py. Decoding holds the interpreter lock until it is done, so
a body that no request could use is refused first. Scans the bytes only: a few milliseconds for the largest body. Raises
RequestError, and what the decoder raises for malformed JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from trireme.errors import ContextLengthError, RequestError
from trireme.serving.text.text_bounds import context_limit

MAX_DEPTH = 64
MAX_FIELDS = 512  # at the top
MAX_ENTRIES = 1 << 16  # in one field, at all its levels together, unless it has a limit of its own
SMALL_BYTES = 64 << 10  # a body with so few is decoded in a few milliseconds whatever it holds

_COLON, _COMMA, _QUOTE = b':,"'
_OPEN, _CLOSE = b"[{", b"]}"
_NOT_MARKS = bytes(byte for byte in range(256) if byte not in b'[]{}:,"')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class FieldBounds(NamedTuple):
    """`limits` are those of single fields. `ids` is the field of token ids, which may have `max_lists` lists of `max_len` ids."""

    limits: Mapping[str, int]
    ids: str = ""
    max_lists: int = 1
    max_len: int | None = None


def check_depth(body: bytes) -> None:
    """Refuses JSON nested deeper than MAX_DEPTH."""
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_levels(_marks(body))


def check_entries(body: bytes, bounds: FieldBounds) -> None:
    """Refuses a body of which any field holds more entries than it may. Raises RequestError that names the field, what it has
    and its limit; ContextLengthError for more ids than the context holds."""
    marks = _marks(body)
    levels = _check_levels(marks)
    num_fields = int(np.count_nonzero((marks == _COLON) & (levels == 1)))
    if num_fields > MAX_FIELDS:
        raise RequestError(f"the body has {num_fields} fields; the limit is {MAX_FIELDS}")
    if np.count_nonzero(marks == _COMMA) < min(bounds.limits.values(), default=MAX_ENTRIES):
        return
    fields = _fields.decode(body)
    if len(fields) != num_fields:
        raise RequestError("the body gives one of its fields more than once")
    for name, raw in fields.items():
        _check_field(name, bytes(raw), bounds)


def _check_field(name: str, raw: bytes, bounds: FieldBounds) -> None:
    marks = _marks(raw)
    num_entries = int(np.count_nonzero(marks == _COMMA)) + 1
    if name == bounds.ids and bounds.max_len is not None:
        num_lists = int(np.count_nonzero(marks == _OPEN[0]))
        _check_ids(name, raw, num_entries, num_lists, bounds.max_lists, bounds.max_len)
    elif num_entries > (limit := bounds.limits.get(name, MAX_ENTRIES)):
        shown = name[:40] if name.isprintable() else "a field"
        raise RequestError(f"{shown} has {num_entries} entries; the limit is {limit}", param=shown)


def _check_ids(name: str, raw: bytes, num_entries: int, num_lists: int, max_lists: int, max_len: int) -> None:
    """A field that is one list of token ids, or lists of them, or a list of texts."""
    has_texts = raw.lstrip(b"[ \t\r\n").startswith(b'"')
    num_prompts = num_entries if has_texts else num_lists - 1
    if num_prompts > max_lists:
        raise RequestError(f"{name} holds {num_prompts} prompts; the limit is {max_lists}", param=name)
    if not has_texts and num_entries > max_len * max(1, num_prompts):
        raise ContextLengthError(f"{context_limit(max_len)}; {name} has {num_entries} tokens", param=name)


def _marks(body: bytes) -> np.ndarray:
    """The brackets, colons and commas outside of strings, in order."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    marks = np.frombuffer(bare.translate(None, _NOT_MARKS), dtype=np.uint8)
    is_quote = marks == _QUOTE
    is_outside = np.bitwise_xor.accumulate(is_quote) == 0 if is_quote.size else is_quote
    found: np.ndarray = marks[is_outside & ~is_quote]
    return found


def _check_levels(marks: np.ndarray) -> np.ndarray:
    """How deep each mark is. Raises RequestError where that is more than MAX_DEPTH."""
    opens = (marks == _OPEN[0]) | (marks == _OPEN[1])
    closes = (marks == _CLOSE[0]) | (marks == _CLOSE[1])
    levels: np.ndarray = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
    if levels.size and int(levels.max()) > MAX_DEPTH:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")
    return levels

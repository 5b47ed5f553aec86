"""What `echo` shows of a prompt, token by token: the join of the tokens is the text, to the byte.

Called by serving/api/openai/completions.py. Pure.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

_decode_utf8 = codecs.utf_8_decode


class PieceTokenizer(Protocol):
    """What an echo needs of serving.text.tokens.Tokenizer."""

    @property
    def num_ends(self) -> tuple[int, int]: ...

    def pieces(self, ids: Iterable[int], *, skip_special: bool = True) -> list[bytes]: ...


class Echo(NamedTuple):
    """A prompt as text. `pieces` has the bytes that each of its tokens has there, b"" for BOS and whatever else the text does
    not show. `text` ends with the last whole character; what generation continues is `TokenText.unfinished`."""

    text: str
    pieces: list[bytes]


def echo_of_ids(tokenizer: PieceTokenizer, ids: np.ndarray) -> Echo:
    """The echo of a prompt that came as token ids: all of them are shown, special ones by name."""
    pieces = tokenizer.pieces(ids.tolist(), skip_special=False)
    return Echo(_decode_utf8(b"".join(pieces), "replace", False)[0], pieces)


def echo_of_text(tokenizer: PieceTokenizer, text: str, ids: np.ndarray, *, add_special: bool) -> Echo:
    """The echo of a prompt that came as `text` and was encoded as `ids`: the text itself, shared out among the tokens."""
    pieces = tokenizer.pieces(ids.tolist(), skip_special=False)
    begin, end = tokenizer.num_ends if add_special else (0, 0)
    for i in (*range(begin), *range(len(pieces) - end, len(pieces))):
        pieces[i] = b""
    raw = text.encode()
    return Echo(text, pieces if b"".join(pieces) == raw else _shared(raw, pieces))


def _shared(raw: bytes, pieces: Sequence[bytes]) -> list[bytes]:
    """The bytes of a text by token where the tokens spell it otherwise (normalized, unknown characters): a token gets its own
    bytes where they are found next, and the first of those that are not found gets what lies between."""
    found = [b""] * len(pieces)
    at, pending = 0, -1  # `pending` is the first token since the last one that was found
    for i, piece in enumerate(pieces):
        if not piece:
            continue
        start = at if raw.startswith(piece, at) else -1 if pending < 0 else raw.find(piece, at, at + 256)
        if start < 0:
            pending = i if pending < 0 else pending
            continue
        if pending >= 0:
            found[pending] = raw[at:start]
        found[i], at, pending = piece, start + len(piece), -1
    rest = pending if pending >= 0 else len(pieces) - 1
    found[rest] += raw[at:]
    return found

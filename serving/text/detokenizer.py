"""Incremental detokenizer: token ids in, text out, never half a character, never text that may become a stop string.

Pure: no tokenizer library, no clock, no I/O. Used by serving/text/generation.py for HTTP streams and for the Python API alike.
Any grouping of the same tokens into calls gives the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

_decode_utf8 = codecs.utf_8_decode
LOOK_BACK = 16  # last tokens of a prompt that may hold the bytes of one character; unknown ids have none


class Pieces(Protocol):
    """What detokenizing needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that `token` stands for in running text; empty for ids that are no token."""


class TokenText(dict[int, "str | bytes"]):
    """What each token adds to a text, found once per token: a str if its bytes are whole characters, else the bytes.

    One per process, shared by all streams. Special tokens are in it too; hiding them is the Detokenizer's choice.
    """

    def __init__(self, tokenizer: Pieces) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids

    def __missing__(self, token: int) -> str | bytes:
        raw = self.tokenizer.token_bytes(token)
        try:
            found: str | bytes = raw.decode()
        except UnicodeDecodeError:
            found = raw
        self[token] = found
        return found

    def shown(self, token: int) -> str:
        """The token as a string of its own, for logprobs: bytes that are no whole character become U+FFFD."""
        text = self[token]
        return text if isinstance(text, str) else text.decode(errors="replace")

    def raw(self, token: int) -> bytes:
        text = self[token]
        return text.encode() if isinstance(text, str) else text

    def unfinished(self, prompt: Sequence[int]) -> bytes:
        """Bytes at the end of a prompt that begin a character and do not complete it, at most 3."""
        tail = b""
        for token in reversed(prompt[-LOOK_BACK:]):
            text = self[token]
            if isinstance(text, str) and text:
                break
            tail = self.raw(token) + tail
        return tail[_decode_utf8(tail, "replace", False)[1] :]


class StopStrings:
    """Finds stop strings across deltas and withholds text that may still become one.

    The stop that ends earliest wins, the longest of those first: the same answer as if the text had come one character
    at a time. `held` is always the longest end of the text so far that is a proper beginning of a stop string.
    """

    __slots__ = ("_beginnings", "_lasts", "_shortest", "found", "held", "include", "stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.stops = tuple(sorted(stops, key=len, reverse=True))
        self.include = include
        self.held = ""
        self.found: str | None = None
        self._shortest = len(self.stops[-1])
        self._lasts = frozenset(stop[-1] for stop in stops)
        # the proper beginnings of all stops by their last character, longest first: most text ends in none of these
        self._beginnings: dict[str, list[str]] = {}
        for beginning in sorted({stop[:n] for stop in stops for n in range(1, len(stop))}, key=len, reverse=True):
            self._beginnings.setdefault(beginning[-1], []).append(beginning)

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text released by `text`. A match ending in it sets `found` and ends the output; unless `armed`, it is ignored."""
        held = self.held
        buffer = held + text if held else text
        if (
            armed
            and len(buffer) >= self._shortest
            and not self._lasts.isdisjoint(text)
            and (at := self._first_end(buffer, len(held)))
        ):
            end, stop = at
            self.found = stop
            self.held = ""
            return buffer[:end] if self.include else buffer[: end - len(stop)]
        for beginning in self._beginnings.get(buffer[-1:], ()):
            if buffer.endswith(beginning):
                self.held = beginning
                return buffer[: -len(beginning)]
        self.held = ""
        return buffer

    def finish(self) -> str:
        """The withheld text: no stop string came of it."""
        held, self.held = self.held, ""
        return held

    def _first_end(self, buffer: str, num_old: int) -> tuple[int, str] | None:
        """(end, stop) of the earliest-ending match that ends after the first `num_old` characters."""
        best: tuple[int, str] | None = None
        for stop in self.stops:
            at = buffer.find(stop, max(0, num_old - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), stop)
        return best


class Detokenizer:
    """Text of one choice. After `stop` is set (the stop string that fired) nothing more may be pushed.

    `hidden_ids` are tokens that end the row and show no text; special tokens are hidden with `skip_special`. Stop strings
    count only from the first text after `min_tokens` tokens. `unfinished` are bytes that the prompt ended with: the text
    begins with the character that they begin. Nothing is shown of them if nothing came after, unless the prompt is `echoed`.
    """

    __slots__ = ("_drops_partial", "_hidden", "_min_tokens", "_partial", "_stops", "_table", "num_tokens")

    def __init__(
        self,
        table: TokenText,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        hidden_ids: Iterable[int] = (),
        min_tokens: int = 0,
        unfinished: bytes = b"",
        echoed: bool = False,
    ) -> None:
        self._table = table
        hidden = frozenset(hidden_ids)
        self._hidden = hidden | table.special_ids if skip_special else hidden
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._partial = unfinished  # bytes that may be the beginning of a character
        self._drops_partial = bool(unfinished) and not echoed  # while they are the prompt's alone
        self.num_tokens = 0

    @property
    def stop(self) -> str | None:
        return self._stops.found if self._stops else None

    def push(self, token: int) -> str:
        """Text that `token` releases; often empty."""
        self.num_tokens += 1
        if token in self._hidden:
            return ""
        text = self._table[token]
        if self._partial or not isinstance(text, str):
            text = self._decode(text)
        if self._stops is None:
            return text
        return self._stops.push(text, armed=self.num_tokens > self._min_tokens)

    def finish(self) -> str:
        """What is left at the end: withheld text, an unfinished character as one U+FFFD."""
        tail = "" if self._drops_partial else self._partial.decode(errors="replace")
        self._partial = b""
        if self._stops is None:
            return tail
        if self._stops.found is not None:
            return ""
        return self._stops.finish() + tail

    def _decode(self, piece: str | bytes) -> str:
        self._drops_partial = self._drops_partial and not piece
        raw = self._partial + (piece if isinstance(piece, bytes) else piece.encode())
        text, num_used = _decode_utf8(raw, "replace", False)
        self._partial = raw[num_used:]
        return text

"""The two engines behind serving.text.tokens: the tokenizers library, and the native SentencePiece encoder.

An encoder turns text into ids and tells what each id stands for; serving.text.tokens does the rest. The native one is ready as
soon as the vocabulary is read: the library would want every possible merge spelled out first, seconds of work for a quarter
of a million tokens.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from trireme.errors import ModelError

META = "\u2581"  # the visible space of SentencePiece
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PLAIN, INERT, ADDED, SPECIAL = range(4)  # kinds of csrc/text/spm.h


class AddedText(NamedTuple):
    """A token that is found in raw text before anything else; a special one has a meaning beyond its text."""

    text: str
    special: bool


class TextEncoder(Protocol):
    """Text to ids. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def adds_space(self) -> bool:
        """Whether a space is put before a text, and before what follows an added token."""

    @property
    def added(self) -> dict[int, AddedText]: ...

    def encode(self, text: str, *, add_special: bool, allow_special: bool) -> np.ndarray:
        """int32 ids. `add_special` puts BOS/EOS around them; without `allow_special` names of special tokens are plain text."""

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled exactly so in the vocabulary, else None."""

    def piece_bytes(self, token: int) -> bytes:
        """Bytes that an ordinary token stands for in running text; b"" for ids that are no token."""


class LibraryEncoder:
    """The tokenizers library. `vocab_size` saves asking it for the whole vocabulary."""

    def __init__(self, fast: FastTokenizer, *, vocab_size: int | None = None) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._decoder, self.adds_space = _decoder_facts(fast)
        if vocab_size is None:
            vocab_size = max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.vocab_size = vocab_size
        added = fast.get_added_tokens_decoder()
        self.added = {token: AddedText(entry.content, entry.special) for token, entry in added.items()}

    def encode(self, text: str, *, add_special: bool, allow_special: bool) -> np.ndarray:
        fast = self._fast if allow_special else self._plain
        return np.array(fast.encode(text, add_special_tokens=add_special).ids, dtype=np.int32)

    def token_id(self, text: str) -> int | None:
        return self._fast.token_to_id(text)

    def piece_bytes(self, token: int) -> bytes:
        text = self._fast.id_to_token(token)
        if text is None:
            return b""
        if self._decoder == "byte_level":
            table = _byte_of_char()
            try:
                return bytes(table[char] for char in text)
            except KeyError:
                return text.encode()
        if self._decoder == "spm":
            return spm_bytes(text)
        anchor = self._fast.token_to_id("a") or 0
        return self._fast.decode([anchor, token]).removeprefix(self._fast.decode([anchor])).encode()

    @functools.cached_property
    def _plain(self) -> FastTokenizer:
        """A second copy that does not look for special tokens (the library keeps that switch inside the tokenizer)."""
        plain = FastTokenizer.from_str(self._fast.to_str())
        plain.encode_special_tokens = True
        return plain


class SpmEncoder:
    """SentencePiece BPE with byte fallback from pieces and scores alone; ids as the library gives with all merges listed.

    `kinds` has PLAIN, INERT, ADDED or SPECIAL for each token. Raises ModelError for a vocabulary that cannot be right and
    where the native part is not built.
    """

    def __init__(
        self, tokens: list[str], scores: Sequence[float], kinds: np.ndarray, *, unknown: int | None, adds_space: bool
    ) -> None:
        self.vocab_size = len(tokens)
        self.adds_space = adds_space
        self.added = {
            int(token): AddedText(tokens[token], kinds[token] == SPECIAL) for token in np.nonzero(kinds >= ADDED)[0]
        }
        self.begin: list[int] = []
        self.end: list[int] = []
        self._tokens = tokens
        try:
            native = importlib.import_module("trireme.serving._native")
            self._native: Any = native.Spm(tokens, scores, kinds, -1 if unknown is None else unknown, adds_space)
        except ImportError as error:
            raise ModelError(
                f"the native encoder (trireme.serving._native) cannot be loaded: {error}", hint="make native"
            ) from error
        except ValueError as error:
            raise ModelError(str(error)) from error

    def encode(self, text: str, *, add_special: bool, allow_special: bool) -> np.ndarray:
        ids: np.ndarray = self._native.encode(text, allow_special)
        if add_special and (self.begin or self.end):
            return np.concatenate([np.array(self.begin, np.int32), ids, np.array(self.end, np.int32)])
        return ids

    def token_id(self, text: str) -> int | None:
        token: int = self._native.find(text)
        return token if token >= 0 else None

    def piece_bytes(self, token: int) -> bytes:
        return spm_bytes(self._tokens[token]) if 0 <= token < len(self._tokens) else b""


def spm_bytes(piece: str) -> bytes:
    """What a SentencePiece piece stands for: one byte (<0xNN>), or its text with real spaces."""
    if piece.startswith("<0x") and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(META, " ").encode()


def _decoder_facts(fast: FastTokenizer) -> tuple[str, bool]:
    """How pieces become bytes (byte-level, SentencePiece-style, or asked of the library) and whether one space is dropped."""
    decoder = json.loads(fast.decoder.__getstate__()) if fast.decoder is not None else {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return "byte_level", False
    if "Metaspace" in kinds or any(s.get("type") == "Replace" and s.get("content") == " " for s in steps):
        return "spm", "Strip" in kinds or any(s.get("prepend_scheme") in ("always", "first") for s in steps)
    return "library", False


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table of printable characters that stand for bytes, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in printable:
            table[chr(spare)] = byte
            spare += 1
    return table

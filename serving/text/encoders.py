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
from trireme.serving.text.text_bounds import TextBound
from trireme.serving.text.tokenizer_bounds import library_bound, spm_bound

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
        """Whether a space is put before a text, which decoding takes away."""

    @property
    def adds_space_after_added(self) -> bool:
        """Whether one is also put before what follows an added token."""

    @property
    def added(self) -> dict[int, AddedText]: ...

    @property
    def bound(self) -> TextBound | None:
        """The least tokens of a text; None where the vocabulary does not tell."""

    def encode(self, text: str, *, add_special: bool, allow_special: bool) -> np.ndarray:
        """int32 ids. `add_special` puts BOS/EOS around them; without `allow_special` names of special tokens are plain text."""

    def token_id(self, text: str) -> int | None:
        """Id of the token spelled exactly so in the vocabulary, else None."""

    def piece_bytes(self, token: int) -> bytes:
        """Bytes that a token stands for in running text, an added one too; b"" for ids that are no token."""


class LibraryEncoder:
    """The tokenizers library. `vocab_size` saves asking it for the whole vocabulary."""

    def __init__(self, fast: FastTokenizer, *, vocab_size: int | None = None) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        steps = _steps(fast.decoder, "decoders")
        kinds = [step.get("type") for step in steps]
        self._is_byte_level = "ByteLevel" in kinds and {*kinds} <= {"ByteLevel", "Fuse"}
        self._has_byte_pieces = "ByteFallback" in kinds
        self.adds_space = _strips_space(steps)
        self.adds_space_after_added = self.adds_space and _prepends_to_each_part(fast)
        vocab = fast.get_vocab(with_added_tokens=True)
        self.vocab_size = vocab_size if vocab_size is not None else max(vocab.values(), default=-1) + 1
        added = fast.get_added_tokens_decoder()
        self.added = {token: AddedText(entry.content, entry.special) for token, entry in added.items()}
        self.bound = library_bound(fast, vocab, _byte_of_char())

    def encode(self, text: str, *, add_special: bool, allow_special: bool) -> np.ndarray:
        fast = self._fast if allow_special else self._plain
        (found,) = fast.encode_batch_fast([text], add_special_tokens=add_special)  # `encode` would hold the GIL
        return np.array(found.ids, dtype=np.int32)

    def token_id(self, text: str) -> int | None:
        return self._fast.token_to_id(text)

    def piece_bytes(self, token: int) -> bytes:
        """The bytes of one token inside running text; b"" for an unknown id."""
        text = self._fast.id_to_token(token)
        if text is None:
            return b""
        if self._is_byte_level:
            return self._byte_level_bytes(token, text)
        if self._has_byte_pieces and (match := _BYTE_PIECE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        anchor, lead = self._anchor
        return self._fast.decode([anchor, token], skip_special_tokens=False).removeprefix(lead).encode()

    def _byte_level_bytes(self, token: int, text: str) -> bytes:
        """The library reads an added token as characters for bytes too. Where that breaks a token whose content is plain text
        (an added "caf\u00e9", say), the content is meant."""
        table = _byte_of_char()
        try:
            raw = bytes(table[char] for char in text)
        except KeyError:
            return text.encode()
        if token in self.added and self._fast.model.id_to_token(token) != text:
            try:
                raw.decode()
            except UnicodeDecodeError:
                return text.encode()
        return raw

    @functools.cached_property
    def _anchor(self) -> tuple[int, str]:
        """A token, and its text: what the decoder makes of another one after it is what that one adds to running text."""
        preferred = (self._fast.token_to_id("a"), self._fast.token_to_id("b"))
        for token in (*preferred, *range(self.vocab_size)):
            text = self._fast.id_to_token(token) if token is not None else None
            if token is None or text is None or _BYTE_PIECE.fullmatch(text):
                continue
            lead = self._fast.decode([token], skip_special_tokens=False)
            if lead and not lead.isspace() and "\ufffd" not in lead:
                return token, lead
        return 0, self._fast.decode([0], skip_special_tokens=False)

    @functools.cached_property
    def _plain(self) -> FastTokenizer:
        """A second tokenizer that does not look for special tokens (the library keeps that switch inside the tokenizer). It shares
        the parts of the first, as reading a large vocabulary again would hold the GIL for seconds."""
        fast = self._fast
        plain = FastTokenizer(fast.model)
        for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            if (part := getattr(fast, name)) is not None:
                setattr(plain, name, part)
        added = fast.get_added_tokens_decoder()
        for _, entry in sorted(added.items()):
            (plain.add_special_tokens if entry.special else plain.add_tokens)([entry])
        if plain.get_added_tokens_decoder().keys() != added.keys():  # ids that the library would not give again
            plain = FastTokenizer.from_str(fast.to_str())
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
        self.adds_space = self.adds_space_after_added = adds_space
        self.added = {
            int(token): AddedText(tokens[token], kinds[token] == SPECIAL) for token in np.nonzero(kinds >= ADDED)[0]
        }
        self.begin: list[int] = []
        self.end: list[int] = []
        self._tokens = tokens
        self.bound = spm_bound(tokens, kinds >= ADDED)
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
        if (added := self.added.get(token)) is not None:
            return (added.text if added.special else added.text.replace(META, " ")).encode()
        return spm_bytes(self._tokens[token]) if 0 <= token < len(self._tokens) else b""


def spm_bytes(piece: str) -> bytes:
    """What a SentencePiece piece stands for: one byte (<0xNN>), or its text with real spaces."""
    if piece.startswith("<0x") and (match := _BYTE_PIECE.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece.replace(META, " ").encode()


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A decoder, normalizer or pre-tokenizer of the library as its steps; `name` is the field that holds them."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[dict[str, Any]] = state.get(name, [state])
    return steps


def _strips_space(steps: list[dict[str, Any]]) -> bool:
    """Whether a decoder drops one space at the beginning of a text: Strip counts once the pieces are one text."""
    kinds = [step.get("type") for step in steps]
    if any(step.get("type") == "Metaspace" and _prepends(step) for step in steps):
        return True
    joined = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    return any(
        step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0
        for step in steps[joined:]
    )


def _prepends_to_each_part(fast: FastTokenizer) -> bool:
    """Whether a space is put before each part of a text between added tokens, and not only before the whole."""
    if any(step.get("type") == "Prepend" for step in _steps(fast.normalizer, "normalizers")):
        return True
    return any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") == "always" and _prepends(step)
        for step in _steps(fast.pre_tokenizer, "pretokenizers")
    )


def _prepends(metaspace: dict[str, Any]) -> bool:
    return metaspace.get("prepend_scheme", "always") in ("always", "first") and metaspace.get("add_prefix_space", True)


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

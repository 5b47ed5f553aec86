"""The bounds of serving/text/text_bounds.py for the tokenizers that there are. Called by serving/text/encoders.py.

A bound must hold for every text, so there is none where parts of a text may vanish before they become tokens, or become one unknown
token together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from trireme.serving.text.text_bounds import SPACES, TextBound, bound_of

_META = "\u2581"  # the visible space of SentencePiece
_BYTE_NAMES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def library_bound(fast: FastTokenizer, vocab: dict[str, int], byte_of_char: dict[str, int]) -> TextBound | None:
    """Of a tokenizer of the library: byte-level BPE, or BPE with all bytes to fall back to. `vocab` is all of it, `byte_of_char`
    the table of byte-level vocabularies."""
    is_composed = _composes(fast)
    if is_composed is None or not isinstance(fast.model, models.BPE):
        return None
    added = fast.get_added_tokens_decoder()
    names = [entry.content for entry in added.values()]
    pieces = [text for text, token in vocab.items() if token not in added]
    lost = SPACES if any(entry.lstrip or entry.rstrip for entry in added.values()) else b""
    kinds = [step.get("type") for step in _steps(fast.decoder, "decoders")]
    if "ByteLevel" in kinds:
        lost += bytes(byte for char, byte in byte_of_char.items() if char not in vocab)
        return bound_of(pieces, added=names, byte_of_char=byte_of_char, uncounted=lost, is_composed=is_composed)
    if "ByteFallback" in kinds and fast.model.byte_fallback and vocab.keys() >= _BYTE_NAMES:
        return bound_of(_spelled(pieces), added=names, uncounted=lost, is_composed=is_composed)
    return None


def spm_bound(tokens: Sequence[str], is_added: np.ndarray) -> TextBound | None:
    """Of a SentencePiece vocabulary with all bytes; `is_added` tells the tokens that are spelled as they are written."""
    if not _BYTE_NAMES.issubset(tokens):
        return None
    kinds = is_added.tolist()
    plain = [text for text, added in zip(tokens, kinds, strict=False) if not added]
    return bound_of(_spelled(plain), added=[text for text, added in zip(tokens, kinds, strict=False) if added])


def _composes(fast: FastTokenizer) -> bool | None:
    """Whether normalizing may join characters (NFC); None when it may do more than that, or cutting may drop some."""
    cut = fast.pre_tokenizer.__getstate__() if fast.pre_tokenizer is not None else b""
    if b'"Removed"' in cut or b"Whitespace" in cut or b"Bert" in cut:
        return None
    steps = _steps(fast.normalizer, "normalizers")
    spaced = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
    if any(step.get("type") not in ("NFC", "Prepend") and step != spaced for step in steps):
        return None
    return any(step.get("type") == "NFC" for step in steps)


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """A part of the library as its steps; `name` is the field that holds them."""
    state = json.loads(part.__getstate__()) if part is not None else {name: []}
    steps: list[dict[str, Any]] = state.get(name, [state])
    return steps


def _spelled(pieces: Sequence[str]) -> list[str]:
    """SentencePiece pieces as they stand in a text, without those of single bytes."""
    return [text.replace(_META, " ") for text in pieces if text not in _BYTE_NAMES]

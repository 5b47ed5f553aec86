"""How few tokens a text can possibly become, found from the vocabulary alone: what cannot fit is refused before it is tokenized.

Made by serving/text/encoders.py once per tokenizer, used by serving/text/processor.py. A token covers at most so many
characters, so many digits, so many letters; the text's own counts divided by these are lower bounds, and the largest of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_CHUNK_BYTES = 1 << 20  # of a text, counted in one call of numpy
SPACES = b" \t\n\r\v\f\x1c\x1d\x1e\x1f"
_CLASSES = {
    "letter": bytes([*range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1)]),
    "digit": b"0123456789",
    "space": SPACES,
    "mark": bytes(byte for byte in range(128) if not chr(byte).isalnum() and byte not in SPACES),
}
_OTHER = len(_CLASSES)  # beyond ASCII
_WIDE = _OTHER + 1  # beyond the first 65536 characters, or the first byte of one
_NUM_CLASSES = _WIDE + 1


def context_limit(max_len: int) -> str:
    """The beginning of errors about the context, in the words that clients look for."""
    return f"this model's maximum context length is {max_len} tokens"


def _class_table() -> np.ndarray:
    table = np.full(256, _OTHER, dtype=np.uint8)
    for number, members in enumerate(_CLASSES.values()):
        table[list(members)] = number
    table[0xF0:0xF5] = _WIDE
    return table


_CLASS_OF = _class_table()


class TextBound(NamedTuple):
    """`longest` is the most units of text in one token, `most` the most of each class. A unit is a byte, or a character where
    tokens are spelled in characters (`in_bytes` False)."""

    longest: int
    most: tuple[int, ...]
    in_bytes: bool
    uncounted: bytes = b""  # that may vanish: the tokenizer does not know them, or other tokens take them up
    is_composed: bool = False  # the tokenizer joins marks to letters (NFC), so a text that is not ASCII may shrink

    @property
    def chars_per_token(self) -> int:
        """The most characters of a text in one token."""
        return self.longest * (_COMPOSED if self.is_composed else 1)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least. Raises UnicodeEncodeError for a text that is no Unicode."""
        counts = self._counts(text.encode())
        total = int(counts.sum())
        if self.is_composed and counts[_OTHER:].any():
            return -(-total // self.chars_per_token)
        bounds = [-(-total // self.longest)]
        bounds += [-(-int(count) // most) for count, most in zip(counts, self.most, strict=True)]
        return max(bounds)

    def _counts(self, raw: bytes) -> np.ndarray:
        """Units of each class."""
        of_byte = np.zeros(256, dtype=np.int64)
        for start in range(0, len(raw), _CHUNK_BYTES):
            of_byte += np.bincount(np.frombuffer(raw[start : start + _CHUNK_BYTES], dtype=np.uint8), minlength=256)
        of_byte[list(self.uncounted)] = 0
        if not self.in_bytes:
            of_byte[0x80:0xC0] = 0  # bytes inside of a character
        return np.bincount(_CLASS_OF, weights=of_byte, minlength=_NUM_CLASSES).astype(np.int64)


_COMPOSED = 4  # bytes of a text that become one by NFC, at most (alpha with three marks: 8 bytes become 3)


def bound_of(
    pieces: Sequence[str],
    *,
    added: Sequence[str] = (),
    byte_of_char: dict[str, int] | None = None,
    uncounted: bytes = b"",
    is_composed: bool = False,
) -> TextBound | None:
    """The bound of a vocabulary of `pieces`, and of `added` tokens that are spelled as they are written. With `byte_of_char` a
    character of a piece stands for one byte, else for itself. None when a piece cannot be read so."""
    codes, lengths = _code_points(pieces)
    in_bytes = byte_of_char is not None
    if byte_of_char is not None:
        table = np.full(max(map(ord, byte_of_char)) + 1, -1, dtype=np.int64)
        for char, byte in byte_of_char.items():
            table[ord(char)] = byte
        if codes.size and (int(codes.max()) >= len(table) or int(table[codes].min()) < 0):
            return None
        codes = table[codes]
    found = [_most(codes if in_bytes else _lead_bytes(codes), lengths)]
    if in_bytes:
        raw = [text.encode() for text in added]
        lengths = np.array([len(text) for text in raw if text], dtype=np.int64)
        found.append(_most(np.frombuffer(b"".join(raw), dtype=np.uint8), lengths))
    else:
        codes, lengths = _code_points(added)
        found.append(_most(_lead_bytes(codes), lengths))
    longest, *most = np.maximum(1, np.max(found, axis=0)).tolist()
    return TextBound(longest, tuple(most), in_bytes, uncounted, is_composed)


def _code_points(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    lengths = np.fromiter(map(len, texts), dtype=np.int64, count=len(texts))
    return codes, lengths[lengths > 0]


def _lead_bytes(codes: np.ndarray) -> np.ndarray:
    """A byte of the class of each character."""
    return np.where(codes >= 0x10000, 0xF0, np.minimum(codes, 0x80))


def _most(codes: np.ndarray, lengths: np.ndarray) -> list[int]:
    """The length of the longest text, and the most units of each class in one."""
    if not len(lengths):
        return [0] * (_NUM_CLASSES + 1)
    classes = _CLASS_OF[codes]
    starts = np.cumsum(lengths) - lengths
    of_class = [np.add.reduceat(classes == number, starts, dtype=np.int32) for number in range(_NUM_CLASSES)]
    return [int(lengths.max()), *(int(counts.max()) for counts in of_class)]

"""The tokenizer of a served model: text to ids and back, built from tokenizer.json or from GGUF metadata.

Used by front ends and the offline Python API, one per process. It never runs code that comes with a model, and never
lets user text turn into special tokens unless the caller says so.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from serving.tokens_gguf import tokenizer_from_gguf
from trireme.errors import ModelError
from trireme.packaged import ModelFiles, read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_META = "\u2581"  # the visible space of SentencePiece
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Text <-> token ids. Safe to use from several threads; ids are int32 arrays.

    `decode` is exactly the join of `token_bytes`, read as UTF-8 with U+FFFD for what is broken, less the one leading
    space that SentencePiece-style tokenizers put before a text and after each added token (`adds_space`).
    """

    def __init__(self, fast: FastTokenizer, *, special: dict[str, str], chat_template: str | None) -> None:
        """`special` maps bos_token, eos_token, ... to their strings."""
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self._decoder, self.adds_space = _decoder_facts(fast)
        self.special_tokens = special
        self.chat_template = chat_template
        self.vocab_size: int = max(fast.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = fast.get_added_tokens_decoder()
        self._added: dict[int, bytes] = {token: entry.content.encode() for token, entry in added.items()}
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.bos_token_id = self.token_id(special.get("bos_token"))
        self.eos_token_id = self.token_id(special.get("eos_token"))
        self.pad_token_id = self.token_id(special.get("pad_token"))
        self._named = {entry.content: token for token, entry in added.items() if entry.special}
        texts = sorted(self._named, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._piece: Callable[[int], bytes] = functools.lru_cache(maxsize=1 << 16)(self._make_piece)

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> np.ndarray:
        """Ids of `text`. `add_special` adds BOS/EOS as the model's tokenizer does; with `allow_special=False` the names
        of special tokens inside the text are encoded as ordinary characters (use it for text written by users)."""
        if not allow_special and self._special_pattern is not None and self._special_pattern.search(text):
            return _ids(self._plain.encode(text, add_special_tokens=add_special).ids)
        return _ids(self._fast.encode(text, add_special_tokens=add_special).ids)

    def encode_segments(self, segments: Sequence[tuple[str, bool]], *, add_special: bool = False) -> np.ndarray:
        """Ids of segments put together as one text; only segments flagged True (trusted, from a template) may name
        special tokens. Equal to encoding the joined text unless an untrusted segment holds a special token's name."""
        text = "".join(part for part, _ in segments)
        trusted = self._trusted_names(segments)
        if self._special_pattern is None or trusted == _names(self._special_pattern, text):
            return _ids(self._fast.encode(text, add_special_tokens=add_special).ids)
        ids: list[int] = []
        if add_special and self.bos_token_id in self._fast.encode("", add_special_tokens=True).ids:
            ids.append(int(self.bos_token_id or 0))
        start = 0
        for begin, end in [*trusted, (len(text), len(text))]:
            if begin > start:
                ids += self._plain.encode(text[start:begin], add_special_tokens=False).ids
            if end > begin:
                ids.append(self._named[text[begin:end]])
            start = end
        return _ids(ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; special tokens are left out unless `skip_special=False`. Unknown ids give nothing."""
        parts: list[bytes] = []
        at_start = self.adds_space
        for token in ids:
            token = int(token)
            if token in self._added:
                if not (skip_special and token in self.special_ids):
                    parts.append(self._added[token])
                at_start = self.adds_space
                continue
            piece = self._piece(token)
            parts.append(piece[1:] if at_start and piece.startswith(b" ") else piece)
            at_start = False
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes that this token adds to the text, whatever stands before it; b"" for unknown ids."""
        return self._added[token] if token in self._added else self._piece(token)

    def token_text(self, token: int) -> str:
        """The token as shown in logprobs: its bytes as text, U+FFFD for broken UTF-8."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, text: str | None) -> int | None:
        """Id of the token spelled exactly so in the vocabulary, else None."""
        return None if text is None else self._fast.token_to_id(text)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    @functools.cached_property
    def _plain(self) -> FastTokenizer:
        """A second copy that does not look for special tokens (the library keeps that switch inside the tokenizer)."""
        plain = FastTokenizer.from_str(self._fast.to_str())
        plain.encode_special_tokens = True
        return plain

    def _trusted_names(self, segments: Sequence[tuple[str, bool]]) -> list[tuple[int, int]]:
        """Spans of special-token names that lie inside a run of trusted segments, as offsets into the joined text."""
        spans: list[tuple[int, int]] = []
        base = 0
        for trusted, run in itertools.groupby(segments, key=lambda segment: segment[1]):
            text = "".join(part for part, _ in run)
            if trusted and self._special_pattern is not None:
                spans += [(base + begin, base + end) for begin, end in _names(self._special_pattern, text)]
            base += len(text)
        return spans

    def _make_piece(self, token: int) -> bytes:
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
            if match := _BYTE_PIECE.fullmatch(text):
                return bytes([int(match[1], 16)])
            return text.replace(_META, " ").encode()
        anchor = self._fast.token_to_id("a") or 0
        return self._fast.decode([anchor, token]).removeprefix(self._fast.decode([anchor])).encode()


def load_tokenizer(
    files: ModelFiles, *, tokenizer: str | Path | None = None, chat_template: str | Path | None = None
) -> Tokenizer:
    """The tokenizer of a model; `tokenizer` (a directory with tokenizer.json, or a .gguf) and `chat_template` (a file)
    override the model's own. Raises ModelError when there is none or it does not parse."""
    source = Path(tokenizer).expanduser() if tokenizer is not None else files.path
    if source.suffix == ".gguf":
        fast, special, template = tokenizer_from_gguf(source)
    else:
        fast, special, template = _read_directory(source)
    if chat_template is not None:
        try:
            template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read the chat template {chat_template}: {error}") from error
    return Tokenizer(fast, special=special, chat_template=template)


def _read_directory(path: Path) -> tuple[FastTokenizer, dict[str, str], str | None]:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"no tokenizer.json in {path}", hint="--tokenizer DIR names a directory that has one")
    try:
        fast = FastTokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for anything it cannot parse
        raise ModelError(f"{file} is not a tokenizer this version can read: {error}") from error
    config = read_json(file.parent / "tokenizer_config.json")
    mapped = read_json(file.parent / "special_tokens_map.json")
    special = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or mapped.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[name] = value
    return fast, special, _read_template(file.parent, config.get("chat_template"))


def _read_template(directory: Path, stored: Any) -> str | None:
    """chat_template.jinja, else the template of tokenizer_config.json (of several named ones, `default`)."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(stored, list):
        stored = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
    if isinstance(stored, dict):
        stored = stored.get("default")
    return stored if isinstance(stored, str) else None


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


def _names(pattern: re.Pattern[str], text: str) -> list[tuple[int, int]]:
    return [match.span() for match in pattern.finditer(text)]


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int32)

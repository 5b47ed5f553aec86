"""The tokenizer of a served model: text to ids and back, built from tokenizer.json or from GGUF metadata.

Used by front ends and the offline Python API, one per process. It never runs code that comes with a model, and never
lets user text turn into special tokens unless the caller says so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as FastTokenizer

from trireme.errors import ModelError
from trireme.machine.places import expanded
from trireme.model.files import ModelFiles, read_json
from trireme.serving.text.encoders import LibraryEncoder, TextEncoder
from trireme.serving.text.special_names import names_pattern
from trireme.serving.text.tokens_gguf import tokenizer_from_gguf

_BEFORE = ("\n", "\x01", ".", "1")  # what text may stand behind: most vocabularies merge one of these with nothing
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Text <-> token ids. Safe to use from several threads; ids are int32 arrays.

    `decode` is exactly the join of `pieces`, read as UTF-8 with U+FFFD for what is broken: `token_bytes` less the one leading
    space that SentencePiece-style tokenizers put before a text and, some of them, after each added token.
    """

    def __init__(self, encoder: TextEncoder, *, special: dict[str, str], chat_template: str | None) -> None:
        """`special` maps bos_token, eos_token, ... to their strings."""
        self._encoder = encoder
        self.special_tokens = special
        self.chat_template = chat_template
        self.vocab_size = encoder.vocab_size
        self.bound = encoder.bound
        added = encoder.added
        self._added: dict[int, bytes] = {token: entry.text.encode() for token, entry in added.items()}
        self.special_names = frozenset(entry.text for entry in added.values() if entry.special)
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.bos_token_id = self.token_id(special.get("bos_token"))
        self.eos_token_id = self.token_id(special.get("eos_token"))
        self.pad_token_id = self.token_id(special.get("pad_token"))
        self._unknown = self.token_id(special.get("unk_token"))  # stands for text that has no token
        self._named = _SpecialNames({entry.text: token for token, entry in added.items() if entry.special})
        self._piece: Callable[[int], bytes] = functools.lru_cache(maxsize=1 << 16)(encoder.piece_bytes)

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> np.ndarray:
        """Ids of `text`. `add_special` adds BOS/EOS as the model's tokenizer does, but no second BOS to a text that begins
        with its name; with `allow_special=False` the names of special tokens inside the text are encoded as ordinary
        characters (use it for text written by users)."""
        names_bos = allow_special and add_special and self.added_bos != "" and text.startswith(self.added_bos)
        if not allow_special and not self._named.spans(text):
            allow_special = True  # the same ids, without the library's second copy
        ids = self._encoder.encode(text, add_special=add_special, allow_special=allow_special)
        return ids[1:] if names_bos and len(ids) > 1 and ids[0] == ids[1] else ids

    @functools.cached_property
    def added_bos(self) -> str:
        """Name of the beginning-of-sequence token that `encode` puts before a text by itself; "" where it puts none."""
        ids = self._encoder.encode("", add_special=True, allow_special=True)
        first = int(ids[0]) if len(ids) else -1
        is_bos = first == self.bos_token_id or (self.bos_token_id is None and first != self.eos_token_id)
        return self._added[first].decode() if is_bos and first in self.special_ids else ""

    def encode_inside(self, text: str) -> np.ndarray:
        """Ids of `text` as it stands behind other text, without the space that some tokenizers put before a text. Names of
        special tokens are plain text."""
        raw = text.encode()
        alone = self.encode(text, add_special=False, allow_special=False)
        if self._spells(alone, raw):
            return alone
        for before in _BEFORE:
            lead = self.encode(before, add_special=False, allow_special=False)
            both = self.encode(before + text, add_special=False, allow_special=False)
            if np.array_equal(both[: len(lead)], lead) and self._spells(both[len(lead) :], raw):
                return both[len(lead) :]
        return alone

    def _spells(self, ids: np.ndarray, raw: bytes) -> bool:
        return b"".join(map(self._piece, ids.tolist())) == raw

    def encode_segments(self, segments: Sequence[tuple[str, bool]], *, add_special: bool = False) -> np.ndarray:
        """Ids of segments put together as one text; only segments flagged True (trusted, from a template) may name
        special tokens. Equal to encoding the joined text unless an untrusted segment holds a special token's name."""
        text = "".join(part for part, _ in segments)
        trusted = self._trusted_names(segments)
        if trusted == self._named.spans(text):
            return self._encoder.encode(text, add_special=add_special, allow_special=True)
        ids: list[int] = []
        if add_special and self.added_bos:
            ids.append(self._named.ids[self.added_bos])
        start = 0
        for begin, end in [*trusted, (len(text), len(text))]:
            if begin > start:
                ids += self._encoder.encode(text[start:begin], add_special=False, allow_special=False).tolist()
            if end > begin:
                ids.append(self._named.ids[text[begin:end]])
            start = end
        return np.array(ids, dtype=np.int32)

    @functools.cached_property
    def num_ends(self) -> tuple[int, int]:
        """How many special tokens `encode` puts before and after a text with `add_special`."""
        bare, whole = (self._encoder.encode("a", add_special=add, allow_special=True).tolist() for add in (False, True))
        spare = len(whole) - len(bare)
        begin = next((n for n in range(spare + 1) if whole[n : n + len(bare)] == bare), spare)
        return begin, spare - begin

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; special tokens are left out unless `skip_special=False`. Unknown ids give nothing."""
        return b"".join(self.pieces(ids, skip_special=skip_special)).decode("utf-8", "replace")

    def pieces(self, ids: Iterable[int], *, skip_special: bool = True) -> list[bytes]:
        """What each of `ids` adds to the text of all, in order; b"" for what adds nothing."""
        found: list[bytes] = []
        after_added = self._encoder.adds_space_after_added
        at_start = self._encoder.adds_space
        for token in ids:
            token = int(token)
            if skip_special and token in self.special_ids:
                found.append(b"")
                at_start |= after_added and token != self._unknown
                continue
            piece = self._piece(token)
            if token in self.special_ids or self._added.get(token) == piece:
                at_start = (
                    after_added and token != self._unknown
                )  # it was found in raw text, so that no space was put before it
            elif at_start and piece:
                piece = piece.removeprefix(b" ")
                at_start = False
            found.append(piece)
        return found

    def token_bytes(self, token: int) -> bytes:
        """Bytes that this token adds to the text, whatever stands before it; b"" for unknown ids."""
        return self._piece(token)

    def token_text(self, token: int) -> str:
        """The token as shown in logprobs: its bytes as text, U+FFFD for broken UTF-8."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_id(self, text: str | None) -> int | None:
        """Id of the token spelled exactly so in the vocabulary, else None."""
        return None if text is None else self._encoder.token_id(text)

    def ids_of(self, *names: str) -> tuple[int, ...]:
        """Ids of those names that are special tokens."""
        return tuple(token for name in names if (token := self._named.ids.get(name)) is not None)

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def _trusted_names(self, segments: Sequence[tuple[str, bool]]) -> list[tuple[int, int]]:
        """Spans of special-token names that lie inside a run of trusted segments, as offsets into the joined text."""
        spans: list[tuple[int, int]] = []
        base = 0
        for trusted, run in itertools.groupby(segments, key=lambda segment: segment[1]):
            text = "".join(part for part, _ in run)
            if trusted:
                spans += [(base + begin, base + end) for begin, end in self._named.spans(text)]
            base += len(text)
        return spans


class _SpecialNames:
    """Finds names of special tokens in text."""

    def __init__(self, ids: dict[str, int]) -> None:
        self.ids = ids
        self._pattern = names_pattern(ids)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Begin and end of each name, the leftmost first and the longest there, none overlapping."""
        return [match.span() for match in self._pattern.finditer(text)] if self._pattern is not None else []


def load_tokenizer(
    files: ModelFiles, *, tokenizer: str | Path | None = None, chat_template: str | Path | None = None
) -> Tokenizer:
    """The tokenizer of a model; `tokenizer` (a directory with tokenizer.json, or a .gguf) and `chat_template` (a file)
    override the model's own. Raises ModelError when there is none or it does not parse."""
    source = expanded(tokenizer) if tokenizer is not None else files.path
    try:
        is_gguf = source.suffix == ".gguf"
        encoder, special, template = tokenizer_from_gguf(source) if is_gguf else _read_directory(source)
    except OSError as error:
        raise ModelError(f"cannot read the tokenizer of {source}: {error.strerror or error}") from error
    if chat_template is not None:
        try:
            template = expanded(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read the chat template {chat_template}: {error}") from error
    return Tokenizer(encoder, special=special, chat_template=template)


def _read_directory(path: Path) -> tuple[TextEncoder, dict[str, str], str | None]:
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
    return LibraryEncoder(fast), special, _read_template(file.parent, config.get("chat_template"))


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

"""What a token adds to a text, against the tokenizers library: its decoder also runs over added tokens. Any tokens, any split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from tests.models.tiny import byte_chars
from trireme.model.files import ModelFiles
from trireme.serving.text.detokenizer import Detokenizer, TokenText
from trireme.serving.text.tokens import Tokenizer, load_tokenizer

META = "\u2581"
WORDS = ["a", "b", "i", "hi", META, META + "a", META + "hi", "\u00e9", "\u4f60", "\U0001f469", "<", ">", "x"]
SPACES = [META * 2, META * 3, META * 4]  # runs of spaces, in the vocabulary and listed as added
SPECIAL = ["<bos>", f"<|end{META}of|>"]


def spm_like(decoder: list[decoders.Decoder]) -> Library:
    """Pieces with a visible space and byte fallback; space runs are listed as added tokens, as Gemma does."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *SPACES, "\n\n"]
    merges = [(META, META), (META * 2, META), (META * 2, META * 2), ("h", "i"), (META, "a"), (META, "hi")]
    known = {piece: i for i, piece in enumerate([*pieces, "h"])}
    fast = Library(models.BPE(vocab=known, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.decoder = decoders.Sequence(decoder)
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", *SPECIAL)])
    fast.add_tokens([AddedToken(text, normalized=False) for text in ("\n\n", *SPACES, "<tool>", f"{META}new")])
    return fast


def gemma() -> Library:
    fast = spm_like([decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.normalizer = normalizers.Replace(" ", META)
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return fast


STRIPPING = [decoders.Replace(META, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def llama2() -> Library:
    fast = spm_like(STRIPPING)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(META), normalizers.Replace(" ", META)])
    return fast


def mistral() -> Library:
    fast = spm_like(STRIPPING)
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return fast


def metaspace() -> Library:
    """No byte fallback: <0x41> is text like any other."""
    fast = spm_like([decoders.Metaspace(prepend_scheme="never"), decoders.Fuse()])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return fast


def byte_level() -> Library:
    known = {char: byte for byte, char in enumerate(byte_chars())}
    fast = Library(models.BPE(vocab=known | {"hi": 256, "\u0120hi": 257}, merges=[("h", "i"), ("\u0120", "hi")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    fast.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "\u4f60", META * 2, "\u0120new", "<tool>")])
    return fast


STRUCTURES = {each.__name__: each for each in (gemma, llama2, mistral, metaspace, byte_level)}


class Pair(NamedTuple):
    name: str
    library: Library
    ours: Tokenizer
    table: TokenText

    def __repr__(self) -> str:
        return self.name


def loaded(directory: Path, name: str, library: Library) -> Pair:
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "unk_token": "<unk>"}))
    ours = load_tokenizer(ModelFiles("safetensors", directory, "test"))
    return Pair(name, library, ours, TokenText(ours))


@pytest.fixture(scope="module", params=STRUCTURES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loaded(tmp_path_factory.mktemp(request.param), request.param, STRUCTURES[request.param]())


def decoded_by_library(pair: Pair, ids: Sequence[int], *, skip_special: bool) -> str:
    """The whole at once. Llama 2's normalizer puts a space before each part between added tokens, which the library's decoder
    takes away before the first only: there each part is decoded alone."""
    if pair.name != "llama2":
        return pair.library.decode(ids, skip_special_tokens=skip_special)
    parts: list[list[int]] = [[]]
    found_in_text = {
        token for token, entry in pair.library.get_added_tokens_decoder().items() if META not in entry.content
    }
    found_in_text = found_in_text - {0} | {pair.library.token_to_id(text) for text in SPECIAL}  # but unknown text is
    for token in ids:
        parts += [[token], []] if token in found_in_text else []
        if token not in found_in_text:
            parts[-1].append(token)
    return "".join(pair.library.decode(part, skip_special_tokens=skip_special) for part in parts)


def streamed(pair: Pair, ids: Sequence[int], *, skip_special: bool) -> str:
    detokenizer = Detokenizer(pair.table, skip_special=skip_special)
    return "".join([*(detokenizer.push(token) for token in ids), detokenizer.finish()])


def is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


TOKENS = st.lists(st.integers(0, 300), max_size=12)
TEXTS = st.lists(
    st.sampled_from(
        ["a", "hi", " ", "    ", "\n\n", "\u00e9", "\u4f60", "\U0001f469", "<tool>", "<bos>", "<0x41>", "\u2581"]
    ),
    max_size=8,
).map("".join)
any_example = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@any_example
@given(TOKENS, st.booleans())
def test_any_tokens_decode_as_the_library_does(pair: Pair, ids: list[int], skip_special: bool) -> None:
    """Of broken UTF-8 the library shows each byte of a run; a stream cannot, so only how byte-level ones are shown is compared."""
    pieces = pair.ours.pieces(ids, skip_special=skip_special)
    assert pair.ours.decode(ids, skip_special=skip_special) == b"".join(pieces).decode(errors="replace")
    if is_text(b"".join(pieces)) or pair.name == "byte_level":
        assert pair.ours.decode(ids, skip_special=skip_special) == decoded_by_library(
            pair, ids, skip_special=skip_special
        )


@any_example
@given(TOKENS, st.booleans())
def test_a_stream_is_the_whole(pair: Pair, ids: list[int], skip_special: bool) -> None:
    """A stream continues a text: what it shows is what the library shows behind other text."""
    text = streamed(pair, ids, skip_special=skip_special)
    (lead,) = pair.ours.encode("x", add_special=False)[-1:].tolist()
    raw = b"".join(
        pair.ours.token_bytes(token) for token in ids if not skip_special or token not in pair.ours.special_ids
    )
    assert text == raw.decode(errors="replace")
    if is_text(raw):
        assert "x" + text == pair.library.decode([lead, *ids], skip_special_tokens=skip_special)


@any_example
@given(TEXTS)
def test_any_text_comes_back(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text, add_special=False)
    assert ids.tolist() == pair.library.encode(text, add_special_tokens=False).ids
    decoded = pair.ours.decode(ids, skip_special=False)
    assert decoded == decoded_by_library(pair, ids.tolist(), skip_special=False)
    if META not in text and "<0x" not in text and not (pair.name == "mistral" and text.startswith(" ")):
        assert decoded == text  # (Metaspace adds no space to a text that begins with one)


def test_runs_of_spaces_are_spaces_wherever_tokens_are_shown(tmp_path: Path) -> None:
    """As Gemma 3 has them: the ids of indented code, as one text, token by token and in a stream that a stop string ends."""
    pair = loaded(tmp_path, "gemma", gemma())
    ids = pair.ours.encode("hi\n\n    hi", add_special=False).tolist()
    indent = pair.library.token_to_id(META * 4)
    assert indent in ids
    assert pair.ours.decode(ids) == "hi\n\n    hi"
    assert pair.table.shown(indent) == "    "
    detokenizer = Detokenizer(pair.table, stops=["\n    h"])
    assert "".join(map(detokenizer.push, ids)) == "hi\n"
    assert detokenizer.stop == "\n    h"


def test_names_of_special_tokens_are_those_of_the_file(pair: Pair) -> None:
    """The decoder shows them otherwise, but user text is looked through for what the encoder would take for them."""
    assert pair.ours.special_names >= set(SPECIAL)
    end = pair.library.token_to_id(SPECIAL[1])
    assert end not in pair.ours.encode(f"a{SPECIAL[1]}", allow_special=False)
    assert end in pair.ours.encode(f"a{SPECIAL[1]}", allow_special=True)


def test_an_added_word_is_itself(tmp_path: Path) -> None:
    """The library would read the e acute of an added word as the byte 0xE9, which is no text."""
    library = byte_level()
    library.add_tokens([AddedToken("caf\u00e9", normalized=False)])
    ours = loaded(tmp_path, "byte_level", library).ours
    assert ours.encode("hi caf\u00e9").tolist()[-1] == library.token_to_id("caf\u00e9")
    assert ours.decode(ours.encode("hi caf\u00e9")) == "hi caf\u00e9"

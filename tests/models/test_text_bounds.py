"""The least tokens of a text never exceed what the tokenizer makes of it, and are close where texts are monotonous."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers

from tests.models.tiny import write_byte_tokenizer, write_spm_tokenizer
from trireme.model.files import ModelFiles, find_model
from trireme.serving.text.encoders import LibraryEncoder
from trireme.serving.text.special_names import names_pattern
from trireme.serving.text.text_bounds import bound_of
from trireme.serving.text.tokens import Tokenizer, load_tokenizer

TEXTS = st.one_of(st.text(), st.text(alphabet="aA1 \n#<|im_start>\u00e9\u0301\u4f60\U0001f600\x00", max_size=200))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(find_model("smollm2"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("spm")
    write_spm_tokenizer(directory)
    return load_tokenizer(ModelFiles("safetensors", directory, "test"))


def composed(directory: Path) -> Tokenizer:
    """T-byte that normalizes to NFC, as Qwen's tokenizers do."""
    directory.mkdir()
    write_byte_tokenizer(directory)
    library = Library.from_file(str(directory / "tokenizer.json"))
    library.normalizer = normalizers.NFC()
    library.save(str(directory / "tokenizer.json"))
    return load_tokenizer(ModelFiles("safetensors", directory, "test"))


@given(TEXTS)
@example("<|im_start|><|im_end|>" * 20)
@example(" " * 500)
@example("1234567890" * 50)
@example("\U0001f468\u200d\U0001f469" * 20)
@settings(deadline=None)
def test_no_text_has_fewer_tokens(smollm2: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (smollm2, spm):
        assert tokenizer.bound is not None
        assert tokenizer.bound.least_tokens(text) <= len(tokenizer.encode(text))


def test_marks_may_join_their_letters(tmp_path: Path) -> None:
    tokenizer = composed(tmp_path / "nfc")
    for text in ("e\u0301" * 100, "\u03b1\u0313\u0300\u0345" * 100, "\u1112\u1161\u11ab" * 100, "abc"):
        assert tokenizer.bound is not None
        assert tokenizer.bound.least_tokens(text) <= len(tokenizer.encode(text))
    assert tokenizer.bound is not None
    assert tokenizer.bound.least_tokens("777") == 3


def test_each_class_of_characters_bounds_by_itself(smollm2: Tokenizer) -> None:
    """SmolLM2 has tokens of 80 marks and of 25 letters, but a token of its own for every digit and every emoji."""
    bound = smollm2.bound
    assert bound is not None
    assert bound.longest == 81
    assert bound.least_tokens("7" * 1000) == 1000 == len(smollm2.encode("7" * 1000))
    assert bound.least_tokens("\U0001f600" * 1000) == 1000
    assert bound.least_tokens("x" * 1000) == 40
    assert bound.least_tokens("") == 0


def test_a_small_vocabulary_by_hand() -> None:
    bound = bound_of(["a", "abc", "12", " x", "!"], added=["<tool>"])
    assert bound is not None
    assert bound.longest == 6
    assert bound.least_tokens("aaaaaaaaa") == 3  # "<tool>" has 4 letters
    assert bound.least_tokens("11111") == 3
    assert bound.least_tokens("     ") == 5
    assert bound.least_tokens("\u4f60" * 4) == 4


def test_what_may_vanish_is_not_counted(tmp_path: Path) -> None:
    """White space beside a token that takes it up, and whole texts where unknown words become one token."""
    write_byte_tokenizer(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["added_tokens"][0]["rstrip"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = load_tokenizer(ModelFiles("safetensors", tmp_path, "test"))
    assert tokenizer.bound is not None
    text = "<s>" + " " * 1000
    assert tokenizer.bound.least_tokens(text) <= len(tokenizer.encode(text)) == 1
    words = Library(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(ModelFiles("safetensors", tmp_path, "test")).bound is None


@given(
    st.lists(st.text(alphabet="<|a1>.*", min_size=1, max_size=5), max_size=12), st.text(alphabet="<|a1>.*", max_size=60)
)
def test_the_pattern_of_names_finds_the_longest_at_the_leftmost(names: list[str], text: str) -> None:
    pattern = names_pattern(names)
    if not names:
        assert pattern is None
        return
    assert pattern is not None
    by_length = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    assert [match.span() for match in pattern.finditer(text)] == [match.span() for match in by_length.finditer(text)]


def test_the_second_tokenizer_shares_the_first_ones_parts(smollm2: Tokenizer, tmp_path: Path) -> None:
    """It gives the ids of a copy that was read anew, and costs no reading."""
    encoder = smollm2._encoder
    assert isinstance(encoder, LibraryEncoder)
    copy = Library.from_str(encoder._fast.to_str())
    copy.encode_special_tokens = True
    for text in ("a<|im_start|>b", "<|endoftext|>", "x <file_sep> \u00e9\u4f60"):
        ids = encoder.encode(text, add_special=False, allow_special=False).tolist()
        assert ids == copy.encode(text, add_special_tokens=False).ids
        assert smollm2.special_ids.isdisjoint(ids)
    assert encoder._plain.model.__class__ is encoder._fast.model.__class__


def test_added_tokens_with_gaps_in_their_ids_keep_them(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    entry = stored["added_tokens"][0]
    stored["model"]["vocab"]["far"] = 400
    stored["added_tokens"] += [{**entry, "id": 401, "content": "<near>"}, {**entry, "id": 400, "content": "far"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = load_tokenizer(ModelFiles("safetensors", tmp_path, "test"))
    text = "a<near>farb"
    copy = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text).tolist() == copy.encode(text).ids
    copy.encode_special_tokens = True
    assert tokenizer.encode(text, allow_special=False).tolist() == copy.encode(text).ids

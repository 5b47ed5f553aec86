"""The native SentencePiece encoder gives the ids of the tokenizers library with every merge spelled out, for any text."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from tests.models.tiny import SPM_ORDERS
from tests.models.tiny_gguf import (
    TOKEN_BYTE,
    TOKEN_CONTROL,
    TOKEN_NORMAL,
    TOKEN_UNKNOWN,
    TOKEN_USER,
    write_tokenizer_gguf,
)
from tests.serving.spm_oracle import oracle_from_gguf
from tests.serving.test_tokens import CORPUS, SPM_TEXTS, from_gguf, spm_gguf
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.serving.text.encoders import ADDED, PLAIN, SPECIAL, SpmEncoder
from trireme.serving.text.tokens import Tokenizer
from trireme.serving.text.tokens_gguf import tokenizer_from_gguf

ROOT = Path(__file__).resolve().parents[2]
TEXTS_TO_CUT = [
    "README.md",
    "serving/text/tokens.py",
    "csrc/cpu/threads.cpp",
    "docs/architecture.md",
    "tests/serving/test_tokens.py",
]


def assert_same(library: Library, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False).tolist()
    assert ids == library.encode(text, add_special_tokens=False).ids, text
    library.encode_special_tokens = True
    try:
        plain = library.encode(text, add_special_tokens=False).ids
    finally:
        library.encode_special_tokens = False
    assert tokenizer.encode(text, add_special=False, allow_special=False).tolist() == plain, text


# ---------------------------------------------------------------- Gemma 3: a quarter of a million pieces


def gemma_path() -> Path:
    try:
        return find_model("gemma3-270m").path
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gemma() -> tuple[Library, Tokenizer]:
    path = gemma_path()
    return oracle_from_gguf(path), from_gguf(path)


def samples(names: list[str]) -> list[str]:
    """Some 600 texts: every language of the corpus, code, runs of spaces, rare characters, added tokens amid text."""
    draw = random.Random(7)
    texts = list(CORPUS)
    for name in TEXTS_TO_CUT:
        whole = (ROOT / name).read_text()
        cuts = sorted(draw.sample(range(len(whole)), 40))
        texts += [whole[begin:end] for begin, end in zip(cuts, cuts[1:], strict=False)]
    texts += [" " * n + "x" + "\n" * n + "\t" * (n % 5) + "end" for n in range(0, 70, 3)]
    ranges = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x780), (0x900, 0xE80), (0x3040, 0x30FF)]
    ranges += [(0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1FAFF), (0xE000, 0xE100), (0x10FFF0, 0x10FFFF)]
    for begin, end in ranges * 12:
        texts.append("".join(chr(draw.randint(begin, end)) for _ in range(draw.randint(1, 60))))
    for _ in range(120):
        words = [
            draw.choice(names),
            draw.choice(CORPUS)[:20],
            draw.choice(names),
            " ",
            "<0x0A>",
            "<",
            "a\u2581b",
            "\n\n",
        ]
        draw.shuffle(words)
        texts.append("".join(words))
    return texts + ["".join(CORPUS) * 4, "a" * 3000, "ab" * 900, " " * 500, "\U0001f469\u200d\U0001f680" * 50]


def test_gemma_ids_equal_the_library(gemma: tuple[Library, Tokenizer]) -> None:
    library, tokenizer = gemma
    names = [entry.content for entry in library.get_added_tokens_decoder().values()]
    texts = samples(names)
    assert len(texts) > 500
    for text in texts:
        assert_same(library, tokenizer, text)
        assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text.replace(
            "\u2581", " "
        )


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(st.text(max_size=12), st.sampled_from(CORPUS), st.sampled_from(["<eos>", "<h1>", "\n\n", "  "])))
)
def test_any_text_has_the_ids_of_the_library(gemma: tuple[Library, Tokenizer], parts: list[str]) -> None:
    assert_same(*gemma, "".join(parts))


def test_gemma_has_its_ends_and_is_ready_at_once() -> None:
    path = gemma_path()
    begun = time.process_time()
    encoder, special, _ = tokenizer_from_gguf(path)
    took = time.process_time() - begun
    assert (encoder.vocab_size, encoder.adds_space, special["bos_token"]) == (262144, False, "<bos>")
    assert encoder.encode("The", add_special=True, allow_special=True).tolist() == [2, 818]
    assert took < 2.5  # the library needs 5 s of the same machine; usual is 0.5 s


# ---------------------------------------------------------------- small vocabularies


@pytest.mark.parametrize("order", SPM_ORDERS)
@pytest.mark.parametrize("prefix", [True, False])
def test_small_vocabulary_equals_the_library(tmp_path: Path, order: str, prefix: bool) -> None:
    path = spm_gguf(tmp_path / "v.gguf", order, add_space_prefix=prefix)
    library, tokenizer = oracle_from_gguf(path), from_gguf(path)
    for text in [*CORPUS, *SPM_TEXTS, "a b <s>c</s>", "<unk> x", "<|x|><|x|> ", "<s"]:
        assert_same(library, tokenizer, text)


def vocabulary(path: Path, pieces: list[str], scores: list[float], *, with_bytes: bool) -> Path:
    tokens = ["<unk>", "<s>", *([f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []), "<|x|>", *pieces]
    kinds = [TOKEN_UNKNOWN, TOKEN_CONTROL, *([TOKEN_BYTE] * 256 if with_bytes else []), TOKEN_USER]
    kinds += [TOKEN_NORMAL] * len(pieces)
    padded = [0.0] * (len(tokens) - len(pieces)) + scores
    return write_tokenizer_gguf(path, model="llama", tokens=tokens, kinds=kinds, scores=padded, add_bos_token=False)


PIECES = st.lists(st.text(alphabet="abc\u2581\u00e9", min_size=1, max_size=6), unique=True, min_size=3, max_size=40)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PIECES, st.data(), st.booleans(), st.text(alphabet="abc \u00e9z\u4f60<|x>", max_size=60))
@example(["a", "b", "ab", "ba", "aba"], None, True, "abababa")
def test_random_vocabularies_with_equal_scores(
    tmp_path: Path, pieces: list[str], data: st.DataObject | None, with_bytes: bool, text: str
) -> None:
    """Few different scores, so that the order among equals counts; characters that neither pieces nor bytes spell."""
    scores = [float(-(i % 3)) for i in range(len(pieces))]
    if data is not None:
        scores = data.draw(st.lists(st.sampled_from([0.0, -1.0, -2.0]), min_size=len(pieces), max_size=len(pieces)))
    path = vocabulary(tmp_path / "v.gguf", pieces, scores, with_bytes=with_bytes)
    assert_same(oracle_from_gguf(path), from_gguf(path), text)


def test_unspelled_characters_are_one_unknown(tmp_path: Path) -> None:
    tokenizer = from_gguf(vocabulary(tmp_path / "v.gguf", ["a", "\u2581"], [0.0, 0.0], with_bytes=False))
    assert tokenizer.encode("a\u4f60\u597da").tolist() == [4, 3, 0, 3]


def test_bad_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match='"a" appears twice'):
        from_gguf(vocabulary(tmp_path / "v.gguf", ["a", "a"], [0.0, 0.0], with_bytes=False))
    with pytest.raises(ModelError, match="score of token 3 is NaN"):
        from_gguf(vocabulary(tmp_path / "v.gguf", ["a", "b"], [float("nan"), 0.0], with_bytes=False))


def test_longest_name_wins_and_names_do_not_overlap() -> None:
    import numpy as np

    tokens = ["a", "<b", "<b>", "<bc>", "c", ">", "<", "b"]
    kinds = np.array([PLAIN, ADDED, SPECIAL, SPECIAL, PLAIN, PLAIN, PLAIN, PLAIN], np.uint8)
    encoder = SpmEncoder(tokens, [0.0] * len(tokens), kinds, unknown=None, adds_space=False)
    both = [encoder.encode("a<bc><b>c<bb", add_special=True, allow_special=allow).tolist() for allow in (True, False)]
    assert both[0] == [0, 3, 2, 4, 1, 7]
    assert both[1] == [0, 6, 7, 4, 5, 6, 7, 5, 4, 1, 7]  # inside the name of a special token no other is looked for


def test_many_special_names_are_found_as_a_pattern_would() -> None:
    tokenizer = from_gguf(gemma_path())
    names = sorted((entry for entry in tokenizer._named.ids), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, names)))
    for text in [
        "<bos>a<unused1><unused12><unused123",
        "<<eos>>",
        "<unused",
        "",
        "<eos",
        "[multimodal]<pad><start_of_turn>",
    ]:
        assert tokenizer._named.spans(text) == [match.span() for match in pattern.finditer(text)]

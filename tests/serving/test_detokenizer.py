"""Incremental detokenizing: whole characters only, stop strings across tokens, and any split gives the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.serving.text.detokenizer import Detokenizer, StopStrings, TokenText

EXTRA = ["DEF", "G", "HI", "J", "K", "X", "ab", "cx"]
SPECIAL = frozenset({256, 257, 258})


class ByteTokens:
    """T-byte of the cases: ids 0-255 are bytes, 256-258 special, then whole strings."""

    special_ids = SPECIAL

    def token_bytes(self, token: int) -> bytes:
        if token < 256:
            return bytes([token])
        if token in SPECIAL:
            return (b"<s>", b"</s>", b"<pad>")[token - 256]
        return EXTRA[token - 259].encode() if token - 259 < len(EXTRA) else b""


TABLE = TokenText(ByteTokens())


def ids(*texts: str) -> list[int]:
    return [259 + EXTRA.index(text) for text in texts]


def deltas(tokens: list[int], **options: object) -> list[str]:
    detokenizer = Detokenizer(TABLE, **options)  # type: ignore[arg-type]
    out = []
    for token in tokens:
        out.append(detokenizer.push(token))
        if detokenizer.stop is not None:
            break
    return [text for text in [*out, detokenizer.finish()] if text]


def test_characters_that_span_tokens() -> None:
    """O01: one delta per character, none with U+FFFD."""
    text = "\u017d\u4f60\U0001f469\u200d\U0001f680!"
    assert deltas(list(text.encode())) == list(text)


def test_cut_inside_a_character_is_one_replacement() -> None:
    """O01 variant: six tokens end inside the woman's face."""
    tokens = list("\u017d\u4f60\U0001f469".encode())
    assert deltas(tokens[:6]) == ["\u017d", "\u4f60", "\ufffd"]


@pytest.mark.parametrize("tokens", [[0xC5, 65], [0xFF], [0xE4, 0xBD, 0xE4, 0xBD, 0xA0], [0x80, 0x80], [0xF0, 0x9F, 10]])
def test_invalid_bytes_equal_the_one_shot_decode(tokens: list[int]) -> None:
    assert "".join(deltas(tokens)) == bytes(tokens).decode(errors="replace")


def test_stop_string_across_tokens_leaks_nothing() -> None:
    """O02."""
    detokenizer = Detokenizer(TABLE, stops=["DEFGHIJ"])
    out = [detokenizer.push(token) for token in ids("DEF", "G", "HI", "J")]
    assert out == ["", "", "", ""]
    assert detokenizer.stop == "DEFGHIJ"
    assert detokenizer.num_tokens == 4
    assert detokenizer.finish() == ""


def test_text_that_did_not_become_a_stop_is_released() -> None:
    """O02 (a)."""
    assert deltas(ids("DEF", "G", "X"), stops=["DEFGHIJ"]) == ["DEFGX"]
    assert deltas(ids("DEF", "G"), stops=["DEFGHIJ"]) == ["DEFG"]


def test_stop_string_may_be_included() -> None:
    """O02 (b)."""
    assert "".join(deltas(ids("DEF", "G", "HI", "J", "K"), stops=["DEFGHIJ"], include_stop=True)) == "DEFGHIJ"


def test_second_stop_inside_the_beginning_of_the_first() -> None:
    """O02 (c)."""
    assert "".join(deltas(ids("ab", "cx"), stops=["abcd", "cx"])) == "ab"


def test_special_tokens_are_hidden_or_shown() -> None:
    assert "".join(deltas([72, 257, 73])) == "HI"
    assert "".join(deltas([72, 257, 73], skip_special=False)) == "H</s>I"
    assert "".join(deltas([72, 73, 33], hidden_ids=[33])) == "HI"
    assert deltas([0xC5, 256, 0xBD]) == ["\u017d"]


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = list(b"a.b.c.d")
    assert "".join(deltas(tokens, stops=["."], min_tokens=3)) == "a.b"
    assert "".join(deltas(tokens, stops=[".b."], min_tokens=3)) == "a"
    assert "".join(deltas(tokens, stops=[".b."], min_tokens=4)) == "a.b.c.d"


def test_ignored_stop_inside_held_text_stays_ignored() -> None:
    """A match that ended before min_tokens must not fire later because its text was still withheld."""
    assert "".join(deltas(list(b"xabz"), stops=["xabc", "a"], min_tokens=2)) == "xabz"


def reference(text: str, stops: list[str], include: bool) -> str:
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end] if include else text[: end - len(stop)]
    return text


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=20),
    include=st.booleans(),
)
def test_any_split_finds_the_same_stop(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    finder = StopStrings(stops, include=include)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = ""
    for start, end in zip(edges, edges[1:], strict=False):
        out += finder.push(text[start:end])
        # nothing released may be taken back: it is a beginning of the right answer
        assert reference(text, stops, include).startswith(out)
        if finder.found is not None:
            break
    out += finder.finish()
    assert out == reference(text, stops, include)


@given(st.lists(st.integers(0, 255), max_size=30))
def test_any_bytes_equal_the_one_shot_decode(tokens: list[int]) -> None:
    out = deltas(tokens)
    assert "".join(out) == bytes(tokens).decode(errors="replace")


@given(st.text(max_size=20))
def test_no_delta_of_valid_text_holds_a_replacement(text: str) -> None:
    text = text.replace("\ufffd", "")
    assert "".join(deltas(list(text.encode()))) == text
    assert all("\ufffd" not in delta for delta in deltas(list(text.encode())))

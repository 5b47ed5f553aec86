"""Echo, text offsets and prompts that end inside a character: what is listed is what the text shows, at its place in it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import make_stub, spm_pieces, write_spm_tokenizer
from tests.models.tiny_gguf import TOKEN_CONTROL, TOKEN_NORMAL, TOKEN_UNKNOWN, write_tokenizer_gguf
from tests.serving.deployment import Served, serve_model
from trireme.model.files import ModelFiles
from trireme.serving.api.openai.echo import echo_of_ids, echo_of_text
from trireme.serving.text.tokens import Tokenizer, load_tokenizer

BOS = 256  # of T-byte
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def spm_stub(directory: Path, script: Sequence[str]) -> Path:
    """A stub whose tokenizer is T-spm as tokenizer.json: adds BOS, and a space before a text and after `<|x|>`."""
    ids = [spm_pieces().index(piece) for piece in script]
    make_stub(directory, scripts=[ids], vocab_size=len(spm_pieces()))
    config = json.loads((directory / "config.json").read_text()) | {"bos_token_id": 1, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    write_spm_tokenizer(directory)
    return directory


async def completed(served: Served, **fields: Any) -> dict[str, Any]:
    """The one choice of a completion; streamed it must be the same."""
    body = {"model": "stub", "temperature": 0, **fields}
    status, answer = await served.post("/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    events = [event["choices"][0] for event in (await served.events("/v1/completions", body))[:-1]]
    assert "".join(event["text"] for event in events) == choice["text"]
    if choice["logprobs"] is not None:
        for name in NAMES:
            parts = [event["logprobs"][name] for event in events if event["logprobs"]]
            assert sum(parts, []) == choice["logprobs"][name]
    found: dict[str, Any] = choice
    return found


def assert_listed_as_shown(choice: dict[str, Any], *, num_hidden: int = 0) -> None:
    """Every token is the text from its offset to the next one's, but for hidden ones at the end."""
    text, columns = choice["text"], choice["logprobs"]
    tokens, offsets = columns["tokens"], [*columns["text_offset"], len(text)]
    count = len(tokens) - num_hidden
    assert [text[offsets[i] : offsets[i + 1]] for i in range(count)] == tokens[:count]
    assert "".join(tokens[:count]) == text
    assert offsets[count:] == [len(text)] * (num_hidden + 1)


async def test_offsets_of_a_sentencepiece_prompt(tmp_path: Path) -> None:
    """The space that the tokenizer puts before a text is not in it, and BOS is not either; what follows is at its place."""
    async with serve_model(spm_stub(tmp_path / "m", ["\u2581hi", "\u2581", "a", "</s>"])) as served:
        both: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 9}
        choice = await completed(served, prompt="hi a", **both)
        assert choice["text"] == "hi a hi a"
        assert choice["logprobs"]["tokens"] == ["", "hi", " a", " hi", " ", "a", "</s>"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 2, 4, 7, 8, 9]
        assert_listed_as_shown(choice, num_hidden=1)
        top = choice["logprobs"]["top_logprobs"]
        assert all(token in row for token, row in zip(choice["logprobs"]["tokens"][1:], top[1:], strict=True))
        for prompt in ("a<|x|>hi", "a<|x|> hi", "<|x|>", "  hi", "hi  hi", "\u00e9hi", "<s>a", ""):
            choice = await completed(served, prompt=prompt, **both)
            assert choice["text"].startswith(prompt)
            if prompt != "\u00e9hi":  # its bytes are tokens of their own
                assert_listed_as_shown(choice, num_hidden=1)
        bare = await completed(served, prompt="hi", add_special_tokens=False, **both)
        assert bare["logprobs"]["text_offset"][:2] == [0, 2]
        ids = [1, spm_pieces().index("\u2581hi")]
        by_ids = await completed(served, prompt=ids, **both)
        assert by_ids["text"] == "<s>hi hi a"
        assert_listed_as_shown(by_ids, num_hidden=1)


async def test_offsets_after_special_tokens_and_a_prompt_cut_inside_a_character(tmp_path: Path) -> None:
    async with serve_model(make_stub(tmp_path / "m", scripts=[[0xA0, 0x21, BOS, 0x42]])) as served:
        both: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 2}
        for hide in (True, False):
            choice = await completed(served, prompt="</s>user\nhi<pad>", skip_special_tokens=hide, **both)
            assert choice["logprobs"]["text_offset"][:6] == [0, 4, 5, 6, 7, 8]
            assert choice["text"] == "</s>user\nhi<pad>\ufffd!"
        begun = [0x61, 0xE4, 0xBD]  # and the script goes on with the last byte of the character
        choice = await completed(served, prompt=begun, **both)
        assert choice["text"] == "a\u4f60!"
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
        choice = await completed(served, prompt=begun, logprobs=0, max_tokens=3)
        assert choice["text"] == "\u4f60!"
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        choice = await completed(served, prompt=begun, max_tokens=2, stop=["\u4f60"])
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        choice = await completed(served, prompt=begun, max_tokens=4, skip_special_tokens=False)
        assert choice["text"] == "\u4f60!<s>B"
        assert (await completed(served, prompt=begun, max_tokens=0))["text"] == ""
        assert (await completed(served, prompt=begun, max_tokens=0, echo=True))["text"] == "a\ufffd"


@pytest.mark.parametrize("character", ["\u00e9", "\u4f60", "\U0001f469"])
async def test_an_answer_cut_inside_a_character_can_be_continued(tmp_path: Path, character: str) -> None:
    """2, 3 and 4 bytes, cut after each of them. Choice 0 breaks the character, choice i leaves its first i bytes out."""
    raw = list(character.encode())
    scripts = [[0x21, 0x21], *([*raw[cut:], 0x21] for cut in range(1, len(raw)))]
    async with serve_model(make_stub(tmp_path / "m", scripts=scripts)) as served:
        for cut in range(1, len(raw)):
            body = {"model": "stub", "prompt": [0x61, *raw[:cut]], "n": len(raw), "max_tokens": len(raw) + 2}
            _, plain = await served.post("/v1/completions", body)
            texts = [choice["text"] for choice in plain["choices"]]
            assert texts[0] == "\ufffd!!"
            assert texts[cut] == character + "!"
            assert texts == [bytes([*raw[:cut], *script]).decode(errors="replace") for script in scripts]
            _, echoed = await served.post("/v1/completions", {**body, "echo": True})
            assert [choice["text"] for choice in echoed["choices"]] == ["a" + text for text in texts]


# ---------------------------------------------------------------- any prompt


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("spm")
    write_spm_tokenizer(directory)
    return load_tokenizer(ModelFiles("safetensors", directory, "test"))


@pytest.fixture(scope="module")
def unknowing(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without byte pieces: what it has no piece for is one unknown token."""
    tokens = ["<unk>", "<s>", "\u2581", "a", "b", "ab"]
    kinds = [TOKEN_UNKNOWN, TOKEN_CONTROL, *[TOKEN_NORMAL] * 4]
    path = write_tokenizer_gguf(
        tmp_path_factory.mktemp("gguf") / "v.gguf",
        model="llama",
        tokens=tokens,
        kinds=kinds,
        scores=[0.0, 0.0, -1.0, -2.0, -3.0, 0.0],
        bos_token_id=1,
        unknown_token_id=0,
    )
    return load_tokenizer(ModelFiles("gguf", path, "test"))


@given(text=st.text(alphabet="hi a\u00e9\u4f60<|x|>s", max_size=24), add_special=st.booleans())
def test_the_pieces_of_a_text_are_the_text(spm: Tokenizer, text: str, add_special: bool) -> None:
    ids = spm.encode(text, add_special=add_special)
    echo = echo_of_text(spm, text, ids, add_special=add_special)
    assert echo.text == text
    assert b"".join(echo.pieces) == text.encode()
    assert [bool(piece) for piece in echo.pieces[: int(add_special)]] == [False] * int(add_special)


@given(text=st.text(alphabet="ab \u4f60\u597d", max_size=24))
def test_unknown_characters_are_shown_as_they_were_written(unknowing: Tokenizer, text: str) -> None:
    ids = unknowing.encode(text)
    echo = echo_of_text(unknowing, text, ids, add_special=True)
    assert len(echo.pieces) == len(ids)
    assert b"".join(echo.pieces) == text.encode()
    for token, piece in zip(ids.tolist(), echo.pieces, strict=True):
        assert token == 0 or piece in (b"", unknowing.token_bytes(token))


@given(st.lists(st.integers(0, 270), max_size=12))
def test_the_pieces_of_ids_are_their_text(spm: Tokenizer, ids: list[int]) -> None:
    echo = echo_of_ids(spm, np.array(ids, np.int32))
    whole = spm.decode(ids, skip_special=False)
    assert b"".join(echo.pieces).decode(errors="replace") == whole
    assert whole in (echo.text, echo.text + "\ufffd")

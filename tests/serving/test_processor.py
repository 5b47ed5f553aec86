"""From SamplingParams and prompts to rows: definite lengths, seeds, bad words, checks against the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models.tiny import make_stub, spm_pieces, write_spm_tokenizer
from trireme.errors import RequestError
from trireme.model.files import ModelFiles, find_model
from trireme.params import SamplingParams
from trireme.serving.text.processor import Processor
from trireme.serving.text.tokens import load_tokenizer


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Processor:
    files = find_model(make_stub(tmp_path_factory.mktemp("stub")))
    return Processor(load_tokenizer(files), max_len=100, vocab_size=259, eos_token_ids=(257,), new_seed=lambda: 77)


def refusal(processor: Processor, num_prompt: int, params: SamplingParams, num_prompts: int = 1) -> RequestError:
    with pytest.raises(RequestError) as caught:
        processor.rows([np.zeros(num_prompt, dtype=np.int32)] * num_prompts, params)
    return caught.value


def test_lengths_are_made_definite(processor: Processor) -> None:
    prompt = np.zeros(90, dtype=np.int32)
    assert processor.rows([prompt], SamplingParams())[0].params.max_tokens == 10
    assert processor.rows([prompt], SamplingParams(max_tokens=10))[0].params.max_tokens == 10
    assert processor.rows([prompt], SamplingParams(max_tokens=0))[0].params.max_tokens == 0
    shorter = Processor(processor.tokenizer, max_len=100, vocab_size=259, default_max_tokens=4)
    assert shorter.rows([prompt], SamplingParams())[0].params.max_tokens == 4
    assert shorter.rows([prompt], SamplingParams(min_tokens=6))[0].params.max_tokens == 6


def test_lengths_that_do_not_fit_name_the_number_that_would(processor: Processor) -> None:
    error = refusal(processor, 90, SamplingParams(max_tokens=11))
    assert error.param == "max_tokens"
    assert "at most 10 fit" in error.message
    assert refusal(processor, 100, SamplingParams()).param == "prompt"
    assert refusal(processor, 90, SamplingParams(min_tokens=11)).param == "min_tokens"


def test_choices_share_the_seed_and_differ_in_their_number(processor: Processor) -> None:
    prompts = [np.zeros(3, dtype=np.int32)] * 2
    rows = processor.rows(prompts, SamplingParams(n=2, seed=5))
    assert [(row.prompt_index, row.params.choice, row.params.seed) for row in rows] == [
        (0, 0, 5),
        (0, 1, 5),
        (1, 0, 5),
        (1, 1, 5),
    ]
    assert processor.rows(prompts, SamplingParams(seed=0))[0].params.seed == 0
    assert processor.rows(prompts, SamplingParams())[0].params.seed == 77


def test_fan_out_is_the_product(processor: Processor) -> None:
    assert refusal(processor, 1, SamplingParams(n=3), num_prompts=171).param == "n"
    assert len(processor.rows([np.zeros(1, dtype=np.int32)] * 170, SamplingParams(n=3))) == 510


def test_end_tokens(processor: Processor) -> None:
    prompt = [np.zeros(3, dtype=np.int32)]
    assert processor.rows(prompt, SamplingParams())[0].params.eos_token_ids == (257,)
    assert processor.rows(prompt, SamplingParams(ignore_eos=True))[0].params.eos_token_ids == ()
    assert processor.rows(prompt, SamplingParams(stop_token_ids=(9,)))[0].params.stop_token_ids == (9,)
    assert processor.rows(prompt, SamplingParams(top_k=-1))[0].params.top_k == 0


def test_bad_words_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Its encoder puts a space before a text: the spelling without one comes from inside a word."""
    write_spm_tokenizer(tmp_path)
    tokenizer = load_tokenizer(ModelFiles("safetensors", tmp_path, "test"))
    pieces = spm_pieces()
    spm = Processor(tokenizer, max_len=100, vocab_size=len(pieces))

    def spelled(word: str) -> set[tuple[str, ...]]:
        return {tuple(pieces[token] for token in ids) for ids in spm.bad_token_ids([word])}

    assert spelled("hi") == spelled(" hi") == {("hi",), ("\u2581hi",)}
    assert spelled("ah") == {("a", "h"), ("\u2581a", "h")}
    assert spelled("\u00e9") == {("<0xC3>", "<0xA9>"), ("\u2581", "<0xC3>", "<0xA9>")}
    assert spelled("hi a") == {("hi", "\u2581a"), ("\u2581hi", "\u2581a")}
    for word in ("hi", " a hi", "i  h", "<s>", "\nhi", "\u00e9\n"):
        wanted = {word.encode(), word.lstrip().encode(), b" " + word.lstrip().encode()}
        found = {b"".join(map(tokenizer.token_bytes, ids)) for ids in spm.bad_token_ids([word])}
        assert found == wanted


def test_bad_words_are_barred_alone_and_after_a_space(processor: Processor) -> None:
    assert processor.bad_token_ids(["no", " no"]) == (tuple(b"no"), tuple(b" no"))
    assert processor.bad_token_ids([" no"]) == (tuple(b" no"), tuple(b"no"))
    assert processor.bad_token_ids(["</s>"]) == (tuple(b"</s>"), tuple(b" </s>"))  # never the special token itself


def test_prompt_ids_are_checked_as_a_whole(processor: Processor) -> None:
    assert processor.prompt_from_ids([0, 258]).dtype == np.int32
    assert processor.prompt_from_ids(np.array([1, 2], dtype=np.int64)).tolist() == [1, 2]
    for bad, where in (([0, 259], 1), ([-1], 0), ([1, 2, -5, 999], 2)):
        with pytest.raises(RequestError) as caught:
            processor.prompt_from_ids(bad)
        assert caught.value.param == f"prompt[{where}]"
    for bad in ([], [2**80], list(range(101))):
        with pytest.raises(RequestError):
            processor.prompt_from_ids(bad)


def test_hopeless_texts_are_refused_before_tokenizing(processor: Processor) -> None:
    with pytest.raises(RequestError, match="characters"):
        processor.prompt_from_text("x" * 30_000)
    with pytest.raises(RequestError, match="no Unicode text"):
        processor.prompt_from_text("\ud800")
    with pytest.raises(RequestError, match="empty"):
        processor.prompt_from_text("")


def test_salts_become_digests(processor: Processor) -> None:
    prompt = [np.zeros(3, dtype=np.int32)]
    first, second = (processor.rows(prompt, SamplingParams(), salt=salt)[0].salt for salt in ("a", "b"))
    assert len(first) == len(second) == 32
    assert first != second
    assert processor.rows(prompt, SamplingParams())[0].salt == b""


def test_what_leaves_no_token_for_the_first_draw_is_refused(processor: Processor) -> None:
    everything = SamplingParams(stop_token_ids=tuple(range(259)), min_tokens=1)
    assert refusal(processor, 1, everything).param == "min_tokens"
    almost = SamplingParams(stop_token_ids=tuple(range(258)), min_tokens=1)
    assert processor.rows([np.zeros(1, dtype=np.int32)], almost)
    assert processor.rows([np.zeros(1, dtype=np.int32)], SamplingParams(stop_token_ids=tuple(range(259))))

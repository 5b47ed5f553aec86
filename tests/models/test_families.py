"""Every family of the decoder table: random tiny models, saved by transformers, give its greedy tokens; GGUF files of them
give the same. Families that transformers lacks are Llama or rearranged Llama checkpoints, which it then computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.drive import Driver, RankedModel, load, logits_of
from tests.models.test_parity import LOGITS_BOUND, assert_parity, reference, reference_logits
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.errors import ModelError
from trireme.model.reader import RopeSpec, read_arch
from trireme.models.arch.rope import attention_scale, dynamic_base, inverse_frequencies

transformers = pytest.importorskip("transformers")

TEXT = [256, *range(30, 90), 7, 7, 250]
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 48,
}
# (type, changes)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 8, "query_pre_attn_scalar": 20}),
    "gemma2-capped": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 24, "sliding_window": 8, "sliding_window_pattern": 2}),
    "phi3": ("phi3", {}),
    "phi3-partial": ("phi3", {"head_dim": 16, "partial_rotary_factor": 0.5, "sliding_window": 8}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.2, "logits_scaling": 1.5},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere-plus": ("cohere", {"use_qk_norm": True}),
    "stablelm": ("stablelm", {}),
    "stablelm-2": (
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "head_dim": 16},
    ),
}


def make(directory: Path, name: str, **changes: Any) -> Path:
    """Writes a random model through transformers: names, shapes and config.json are its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    offset = 0.0 if kind.startswith("gemma") else 1.0
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in key:
                weight.copy_((0.0 if key.endswith("bias") else offset) + 0.2 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise if "embed" in key else noise * (1.6 / weight.shape[-1] ** 0.5))
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_tiny_model_equals_transformers(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    assert_parity(path, load(path))


@pytest.mark.parametrize("name", MODELS)
def test_ranks_and_chunks_change_no_bit(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    alone = logits_of(load(path), TEXT)
    assert torch.equal(logits_of(load(path), TEXT, chunk=7), alone)
    assert torch.equal(logits_of(RankedModel(path, tp=2, pp=1), TEXT, chunk=9), alone)
    assert torch.equal(logits_of(RankedModel(path, tp=1, pp=3), TEXT), alone)


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("cohere", "stablelm"))])
def test_native_stage_equals_layer_by_layer_bit_for_bit(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    native, layered = load(path), load(path, runtime="torch")
    assert (type(native).__name__, type(layered.body).__name__) == ("NativeDecoder", "TorchDecoder")
    assert torch.equal(logits_of(layered, TEXT, chunk=9), logits_of(native, TEXT, chunk=9))


# ---------------------------------------------------------------- rearranged Llama checkpoints


def rearrange(path: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    old = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**old, **config}))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_internlm2_is_llama_with_grouped_rows(tmp_path: Path) -> None:
    expected = reference(make_tiny(tmp_path / "llama"))
    path = make_tiny(tmp_path / "internlm2")
    renames = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    weights = load_file(path / "model.safetensors")
    for layer in range(2):
        at = f"model.layers.{layer}."
        q, k, v = (weights.pop(f"{at}self_attn.{side}_proj.weight").view(2, -1, 16, 64) for side in "qkv")
        weights[at + "attention.wqkv.weight"] = torch.cat((q, k, v), dim=1).view(-1, 64).contiguous()
    for old, new in renames.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    rearrange(path, {"model_type": "internlm2", "bias": False}, weights)
    assert (logits_of(load(path), TEXT) - reference_logits(expected, TEXT)).abs().max() < LOGITS_BOUND


@pytest.mark.parametrize("vocab_size", [320, 125696])
def test_baichuan_is_llama_with_one_matrix_and_maybe_a_unit_head(tmp_path: Path, vocab_size: int) -> None:
    options = {"num_key_value_heads": 4, "vocab_size": vocab_size, "num_hidden_layers": 1, "tokenizer": False}
    llama, path = make_tiny(tmp_path / "llama", **options), make_tiny(tmp_path / "baichuan", **options)
    weights = load_file(path / "model.safetensors")
    at = "model.layers.0.self_attn."
    weights[at + "W_pack.weight"] = torch.cat([weights.pop(f"{at}{side}_proj.weight") for side in "qkv"])
    if vocab_size > 320:
        unit = load_file(llama / "model.safetensors")
        unit["lm_head.weight"] = torch.nn.functional.normalize(unit["lm_head.weight"])
        save_file(unit, llama / "model.safetensors", metadata={"format": "pt"})
    rearrange(path, {"model_type": "baichuan"}, weights)
    error = logits_of(load(path), TEXT[:20]) - reference_logits(reference(llama), TEXT[:20])
    assert error.abs().max() < LOGITS_BOUND


def test_large_baichuan_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, tokenizer=False)
    rearrange(path, {"model_type": "baichuan", "hidden_size": 5120}, {})
    with pytest.raises(ModelError, match="ALiBi"):
        read_arch(path)


# ---------------------------------------------------------------- rotary rules that depend on the length


def test_dynamic_ntk_base_grows_with_the_length() -> None:
    spec = RopeSpec(kind="dynamic", dim=8, theta=10000.0, factor=4.0, original_max_position=16)
    bases = [dynamic_base(spec, length) for length in (8, 16, 17, 32, 64)]
    assert bases == pytest.approx([10000, 10000, 13465.2168, 85498.7973, 305673.5094], rel=1e-8)
    frequencies = torch.from_numpy(inverse_frequencies(spec, 32))
    torch.testing.assert_close(frequencies, torch.tensor([1, 0.058480355, 0.0034199519, 0.0002]), rtol=1e-6, atol=0)


def test_longrope_attention_scale() -> None:
    spec = RopeSpec(kind="longrope", dim=8, factor=32.0, original_max_position=4096)
    assert attention_scale(spec) == pytest.approx(1.190238, rel=1e-6)


def length_dependent(tmp_path: Path, kind: str) -> Path:
    if kind == "longrope":
        trained = LONGROPE["original_max_position_embeddings"]  # (the family's own field, which would be 4096)
        lengths = {"max_position_embeddings": 192, "original_max_position_embeddings": trained}
        return make(tmp_path, "phi3", **lengths, rope_parameters=LONGROPE)
    rope = {"rope_type": "dynamic", "factor": 4.0}
    return make_tiny(tmp_path, max_position_embeddings=48, rope_scaling=rope)


@pytest.mark.parametrize("runtime", ["native", "torch"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotation_that_depends_on_the_length(tmp_path: Path, kind: str, runtime: str) -> None:
    """As transformers computes it: a whole prompt in one way, and in another once it is longer than the trained length."""
    path = length_dependent(tmp_path, kind)
    model = load(path, max_len=192, runtime=runtime)
    for length in (20, 48, 49, 64):
        text = TEXT[:length]
        expected = reference_logits(reference(path), text)
        for chunk in (0, 7):
            driver = Driver(model, 1, length, num_prompt=length)
            size = chunk or length
            parts = [
                driver.step([(0, text[start : start + size])], all_logits=True) for start in range(0, length, size)
            ]
            got = torch.cat([part for part in parts if part is not None])
            torch.testing.assert_close(got, expected, rtol=0, atol=LOGITS_BOUND)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_generation_across_the_trained_length(tmp_path: Path, kind: str) -> None:
    """Generated tokens are rotated for the length they reach; what is in the cache stays as it was."""
    path = length_dependent(tmp_path, kind)
    expected, model = reference(path), load(path, max_len=192)
    driver = Driver(model, 1, 60, num_prompt=44)
    cache = transformers.DynamicCache()
    with torch.inference_mode():
        for start, stop in [(0, 44), *((at, at + 1) for at in range(44, 56))]:
            got = driver.step([(0, TEXT[start:stop])])
            want = expected(torch.tensor([TEXT[start:stop]]), cache=cache, use_cache=True).logits[0, -1:]
            assert got is not None
            torch.testing.assert_close(got, want, rtol=0, atol=LOGITS_BOUND)


# ---------------------------------------------------------------- GGUF


GGUF = ["gemma", "gemma2", "gemma2-capped", "gemma3", "phi3", "olmo2", "granite", "smollm3", "cohere", "stablelm"]


@pytest.mark.parametrize("name", GGUF)
def test_gguf_equals_its_directory(tmp_path: Path, name: str) -> None:
    layers = {"gemma3": {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 24}}.get(
        name, {}
    )
    layers |= {"smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}}.get(name, {})
    layers |= {"gemma2": {"query_pre_attn_scalar": 24}, "gemma2-capped": {"query_pre_attn_scalar": 16}}.get(name, {})
    path = make(tmp_path / "hf", name, **layers)
    model = load(gguf_from_directory(path, tmp_path / "model.gguf"))
    torch.testing.assert_close(logits_of(model, TEXT), logits_of(load(path), TEXT), rtol=0, atol=LOGITS_BOUND)


@pytest.mark.parametrize("name", ["gemma2", "granite", "olmo2"])
def test_rows_of_a_long_step_do_not_depend_on_how_it_is_cut(tmp_path: Path, name: str) -> None:
    """The native stage takes a step through the feed-forward network in parts, torch in one piece."""
    path, text = make(tmp_path, name), (TEXT * 4)[:300]
    native = logits_of(load(path), text)
    assert torch.equal(logits_of(load(path, runtime="torch"), text), native)
    assert torch.equal(logits_of(load(path), text, chunk=150), native)

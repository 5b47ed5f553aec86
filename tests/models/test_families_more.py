"""GPT-2, GPT-NeoX, Falcon, Llama 4 (text) and GPT-OSS: random tiny models, saved by transformers, give its greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.drive import RankedModel, greedy, load, logits_of
from tests.models.test_parity import LOGITS_BOUND, NUM_NEW, PROMPTS, assert_parity, reference, reference_logits
from trireme.errors import ModelError
from trireme.machine.memory_budget import num_params
from trireme.model.reader import read_arch
from trireme.models.arch.gpt_names import qkv_heads
from trireme.models.cpu import ops
from trireme.models.cpu.ops_reference import (
    clamped_swiglu,
    gelu,
    gelu_reference,
    layer_norm,
    layer_norm_reference,
    rows_by_chunk,
    torch_attention,
)
from trireme.models.forward import ForwardBatch, KVLayer
from trireme.topology.mesh import split_heads

transformers = pytest.importorskip("transformers")
causal_model = transformers.AutoModelForCausalLM  # imported while collecting: it takes long, and tests have a timeout

TEXT = [256, *range(30, 90), 7, 7, 250]
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
MOE: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "intermediate_size": 96,
}
# (type, changes): every variant that the bodies know
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-scaled": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 128, "rotary_pct": 0.5}),
    "gpt_neox-plain": (
        "gpt_neox",
        {"intermediate_size": 128, "rotary_pct": 1.0, "use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "falcon-plain": ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "num_kv_heads": 4}),
    "llama4": (
        "llama4_text",
        {
            **MOE,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 160,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 16,
            "floor_scale": 8,
            "pad_token_id": 258,
        },
    ),
    "llama4-scout": (
        "llama4_text",
        {**MOE, "num_experts_per_tok": 1, "use_qk_norm": False, "attn_temperature_tuning": False, "pad_token_id": 258},
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **MOE,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
}
MODELS |= {
    "mixtral": ("mixtral", {**MOE, "num_experts_per_tok": 2}),
    "mixtral-windowed": ("mixtral", {**MOE, "num_experts_per_tok": 3, "sliding_window": 8}),
    "qwen3_moe": (
        "qwen3_moe",
        {**MOE, "num_experts_per_tok": 2, "moe_intermediate_size": 80, "norm_topk_prob": True, "num_experts": 4},
    ),
    "qwen3_moe-mixed": (
        "qwen3_moe",
        {
            **MOE,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 80,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "attention_bias": True,
        },
    ),
}
GPT = [name for name in MODELS if not name.startswith(("llama4", "gpt_oss", "mixtral", "qwen3_moe"))]


def make(directory: Path, name: str, **changes: Any) -> Path:
    """Writes a random model through transformers: names, shapes and config.json are its own."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options, **changes})
    model = causal_model.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    gain = 4.0 if name in GPT else 1.6  # (so that no model gives one token for ever)
    with torch.no_grad():
        for at, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if at.endswith("sinks"):
                weight.copy_(2 * noise)
            elif at.endswith("bias"):
                weight.copy_(0.3 * noise)
            elif weight.ndim == 1:
                weight.copy_(1 + 0.2 * noise)
            elif weight.shape[0] == config.vocab_size:
                weight.copy_(
                    noise * (0.3 if config.tie_word_embeddings else 1.0)
                )  # (else a tied head repeats its input)
            else:
                weight.copy_(noise * (gain / weight.shape[-1 if weight.ndim == 2 else 1] ** 0.5))
    model.save_pretrained(directory)
    return directory


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def rewrite(path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_tiny_model_equals_transformers(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    model = load(path)
    assert_parity(path, model)
    assert len(set(greedy(model, PROMPTS[1:2], NUM_NEW)[0])) > 4
    assert model.body.weight_bytes > 0


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "falcon-7b", "falcon-40b", "llama4", "gpt_oss", "mixtral", "qwen3_moe"]
)
def test_ranks_together_change_no_bit(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    alone = logits_of(load(path), TEXT, chunk=9)
    for tp, pp in ((2, 1), (1, 2), (2, 2)):
        assert torch.equal(logits_of(RankedModel(path, tp=tp, pp=pp), TEXT, chunk=9), alone)


@pytest.mark.parametrize("name", ["gpt2", "falcon-40b", "llama4", "gpt_oss", "mixtral", "qwen3_moe"])
def test_chunks_and_batches_change_no_bit(tmp_path: Path, name: str) -> None:
    model = load(make(tmp_path, name))
    whole = logits_of(model, TEXT)
    for chunk in (1, 7, 16):
        assert torch.equal(logits_of(model, TEXT, chunk=chunk, block_size=8), whole)


# ---------------------------------------------------------------- forms of checkpoints


def test_gpt2_without_prefix_and_with_masks(tmp_path: Path) -> None:
    """As openai-community/gpt2 is stored."""
    path = make(tmp_path, "gpt2")
    expected = logits_of(load(path), TEXT)
    stored = load_file(path / "model.safetensors")
    assert all(name.startswith("transformer.") for name in stored)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    rewrite(path, weights)
    assert torch.equal(logits_of(load(path), TEXT), expected)


@pytest.mark.parametrize("head", ["embed_out", "lm_head"])
def test_head_of_gpt_neox_has_two_names(tmp_path: Path, head: str) -> None:
    path = make(tmp_path, "gpt_neox")
    stored = load_file(path / "model.safetensors")
    (old,) = [name for name in stored if name in ("embed_out.weight", "lm_head.weight")]
    stored[head + ".weight"] = stored.pop(old)
    rewrite(path, stored)
    assert logits_of(load(path), TEXT).shape == (len(TEXT), 320)


def test_text_part_of_a_checkpoint_that_sees_images(tmp_path: Path) -> None:
    path = make(tmp_path, "llama4")
    expected = logits_of(load(path), TEXT)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": config, "vision_config": {}}))
    weights = {"language_model." + name: tensor for name, tensor in load_file(path / "model.safetensors").items()}
    rewrite(path, weights | {"vision_model.class_embedding": torch.ones(4)})
    assert torch.equal(logits_of(load(path), TEXT), expected)


def test_mxfp4_experts_equal_their_expansion(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = make(tmp_path, "gpt_oss", intermediate_size=64)
    dense = load_file(path / "model.safetensors")
    packed = dict(dense)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = packed.pop(name).shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (count, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        assert dense[name].shape == (count, inputs, outputs)
    rewrite(path, dense)
    expected = reference_logits(reference(path), TEXT)
    torch.testing.assert_close(logits_of(load(path), TEXT), expected, rtol=0, atol=LOGITS_BOUND)
    rewrite(path, packed)
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    # a kernel that takes the blocks as they are rounds activations to int8, upon which a few tokens choose other experts
    error = (logits_of(load(path), TEXT) - expected).abs()
    assert error.median() < 0.2


def test_kv_blocks_that_do_not_divide_attention_chunks(tmp_path: Path) -> None:
    path = make(tmp_path, "llama4")
    model = load(path)
    expected = reference_logits(reference(path), TEXT)
    for block_size in (6, 16, 32):
        got = logits_of(model, TEXT, chunk=13, block_size=block_size)
        torch.testing.assert_close(got, expected, rtol=0, atol=LOGITS_BOUND)


def test_attention_chunks_matter(tmp_path: Path) -> None:
    near = logits_of(load(make(tmp_path / "a", "llama4")), TEXT)
    far = logits_of(load(make(tmp_path / "b", "llama4", attention_chunk_size=None)), TEXT)
    assert torch.equal(near[:16], far[:16])
    assert (near[40:] - far[40:]).abs().max() > 0.1


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("falcon-7b", {"alibi": True}, "ALiBi"),
        ("falcon-7b", {"activation": "swish"}, "activation 'swish'"),
        ("falcon-40b", {"parallel_attn": False}, "without parallel_attn"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"n_head": 3}, "not a multiple of 3 heads"),
        ("gpt_neox", {"quantization_config": {"quant_method": "gptq"}}, r"quantized weights \(gptq\)"),
        ("gpt_oss", {"num_experts_per_tok": 9}, "9 experts per token of 4"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 2}, "layer_types"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 experts per token of 4"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob false"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("llama4", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("llama4", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_variants_without_a_body_are_named(tmp_path: Path, name: str, changes: dict[str, Any], said: str) -> None:
    kind, options = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **options}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=said):
        read_arch(tmp_path)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt_oss")
    stored = load_file(path / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_bias"]
    rewrite(path, stored)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj_bias"):
        load(path)


def test_more_positions_than_gpt2_has(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="512 positions; 513"):
        load(make(tmp_path, "gpt2"), max_len=513)


# ---------------------------------------------------------------- ops


def test_norm_and_activations_equal_their_references() -> None:
    x = 3 * torch.randn(5, 48, generator=torch.Generator().manual_seed(0))
    weight, bias = torch.rand(48) + 0.5, torch.randn(48)
    for given in (bias, None):
        close = layer_norm_reference(x, weight, given, 1e-5)
        torch.testing.assert_close(layer_norm(x, weight, given, 1e-5), close, rtol=1e-5, atol=1e-5)
    for tanh in (False, True):
        torch.testing.assert_close(gelu(x, tanh=tanh), gelu_reference(x, tanh=tanh), rtol=1e-5, atol=1e-6)
    assert clamped_swiglu(torch.tensor([[9.0, 9.0]]), 2.0, 0.0).item() == 3.0


def test_rows_cut_by_chunk_attend_as_a_mask_does() -> None:
    generator = torch.Generator().manual_seed(3)
    kv = KVLayer(torch.randn(40, 2, 16, 4, generator=generator), torch.randn(40, 2, 4, 16, generator=generator))
    contexts, queries = [3, 8, 9, 31, 32], [3, 1, 4, 20, 32]
    starts = [0, *torch.tensor(queries).cumsum(0).tolist()]
    q = torch.randn(starts[-1], 4, 16, generator=generator)
    empty = torch.empty(0, dtype=torch.int32)
    table = torch.randperm(40, generator=generator).view(5, 8).int()
    batch = ForwardBatch(
        token_ids=empty,
        positions=empty,
        slots=empty,
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor(contexts, dtype=torch.int32),
        block_table=table,
        logits_index=empty,
        choices=empty,
        num_prompt=empty,
    )
    got = ops.paged_attention(q, kv, rows_by_chunk(batch, 8, 4), 0.25)
    torch.testing.assert_close(got, torch_attention(q, kv, batch, 0.25, chunk=8), rtol=1e-5, atol=1e-5)
    plain = ops.paged_attention(q, kv, batch, 0.25, 5)
    torch.testing.assert_close(plain, torch_attention(q, kv, batch, 0.25, window=5), rtol=1e-5, atol=1e-5)
    sunk = torch_attention(q, kv, batch, 0.25, sinks=torch.full((4,), 80.0))
    assert sunk.abs().max() < 1e-20


def test_heads_of_fused_matrices() -> None:
    own = split_heads(4, 2, 2, 1)
    assert qkv_heads(4, 2, own, grouped=True).tolist() == [4, 5, 6, 7]
    assert qkv_heads(4, 2, own, grouped=False).tolist() == [2, 3, 5, 7]


def test_prompts_decode_together(tmp_path: Path) -> None:
    """Experts are computed for the rows of many requests at once; nobody's tokens depend on the others."""
    model = load(make(tmp_path, "llama4"))
    alone = [greedy(model, [prompt], NUM_NEW, block_size=16)[0] for prompt in PROMPTS]
    assert greedy(model, PROMPTS, NUM_NEW, block_size=16) == alone


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-40b", "llama4", "gpt_oss"])
def test_parameters_are_counted(tmp_path: Path, name: str) -> None:
    path = make(tmp_path, name)
    stored = sum(weight.numel() for weight in load_file(path / "model.safetensors").values() if weight.ndim > 1)
    positions = 512 * 64 if name == "gpt2" else 0
    assert num_params(read_arch(path)) + positions == pytest.approx(stored, rel=0.01)

"""Every form a checkpoint may have gives the same model: stored dtypes, shards, tied heads, rope rules, windows, GGUF kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.drive import SOLO, RankedModel, load, logits_of
from tests.models.test_parity import (
    FAMILIES,
    LOGITS_BOUND,
    assert_parity,
    reference,
    reference_logits,
)
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.model.reader import RopeSpec, read_arch
from trireme.models.arch.rope import inverse_frequencies
from trireme.models.forward import SoloGroup
from trireme.models.load import load_model

TEXT = [256, *range(30, 110), 7, 7, 250]


def change(path: Path, **weights: torch.Tensor | None) -> None:
    """Adds, replaces or (None) removes weights of a checkpoint."""
    stored = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def test_bfloat16_and_float16_weights_stay_as_stored(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        path = make_tiny(tmp_path / dtype, dtype=dtype)
        model = load(path)
        assert_parity(path, model)
        assert {weight.kind for layer in model.weights.layers for weight in layer.qkv.weights} == {
            {"bfloat16": "BF16", "float16": "F16"}[dtype]
        }


def test_dtype_option_rounds_dense_weights(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "a")
    rounded = make_tiny(tmp_path / "b")
    stored = load_file(rounded / "model.safetensors")
    change(rounded, **{name: w.bfloat16().float() for name, w in stored.items() if w.ndim == 2})
    model = load(path, dtype="bfloat16")
    torch.testing.assert_close(logits_of(model, TEXT), logits_of(load(rounded), TEXT), rtol=0, atol=LOGITS_BOUND)
    assert {weight.kind for weight in model.weights.layers[0].o.weights} == {"BF16"}


def test_sharded_checkpoint_with_index(tmp_path: Path) -> None:
    whole, sharded = make_tiny(tmp_path / "a"), make_tiny(tmp_path / "b", shards=3)
    assert torch.equal(logits_of(load(whole), TEXT), logits_of(load(sharded), TEXT))


def test_tied_embeddings_share_one_matrix(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    model = load(path)
    assert_parity(path, model)
    assert model.weights.embedding is model.weights.head
    assert_parity(path, RankedModel(path, tp=2, pp=2))


def test_head_counts_that_do_not_divide(tmp_path: Path) -> None:
    """6 heads with 3 KV heads over 2 ranks, and one KV head shared by 2 ranks; 3 layers over 2 stages; odd vocabulary."""
    path = make_tiny(
        tmp_path / "a",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=3,
        vocab_size=321,
        head_dim=24,
    )
    assert_parity(path, RankedModel(path, tp=2, pp=2))
    assert torch.equal(logits_of(RankedModel(path, tp=3, pp=1), TEXT), logits_of(load(path), TEXT))
    path = make_tiny(tmp_path / "b", num_key_value_heads=1, intermediate_size=160)
    assert torch.equal(logits_of(RankedModel(path, tp=4, pp=1), TEXT), logits_of(load(path), TEXT))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16,
            "attention_factor": 1.1,
        },
    ],
    ids=["linear", "llama3", "yarn", "yarn-options"],
)
def test_rope_rules(tmp_path: Path, rope: dict[str, Any]) -> None:
    path = make_tiny(tmp_path, max_position_embeddings=256, rope_scaling=rope)
    torch.testing.assert_close(
        logits_of(load(path), TEXT), reference_logits(reference(path), TEXT), rtol=0, atol=LOGITS_BOUND
    )
    plain = make_tiny(tmp_path / "plain")
    assert (logits_of(load(path), TEXT) - logits_of(load(plain), TEXT)).abs().max() > 1


def test_rope_parameters_of_newer_configs(tmp_path: Path) -> None:
    path = make_tiny(
        tmp_path, "qwen3", rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    )
    torch.testing.assert_close(
        logits_of(load(path), TEXT), reference_logits(reference(path), TEXT), rtol=0, atol=LOGITS_BOUND
    )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    ],
)
def test_sliding_window(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    path = make_tiny(tmp_path, family, **changes)
    expected = reference_logits(reference(path, attn_implementation="eager"), TEXT)
    for chunk in (0, 5):
        torch.testing.assert_close(logits_of(load(path), TEXT, chunk=chunk), expected, rtol=0, atol=LOGITS_BOUND)


def test_biases_of_llama(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, attention_bias=True, mlp_bias=True)
    assert_parity(path, load(path))
    assert_parity(path, RankedModel(path, tp=2, pp=1))


def test_chunks_and_batches_change_no_bit(tmp_path: Path) -> None:
    model = load(make_tiny(tmp_path))
    whole = logits_of(model, TEXT)
    for chunk in (1, 7, 16):
        assert torch.equal(logits_of(model, TEXT, chunk=chunk, block_size=16), whole)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_native_stage_equals_layer_by_layer_bit_for_bit(tmp_path: Path, family: str) -> None:
    path = make_tiny(tmp_path / "hf", family)
    kinds = {"attn_v.weight": "Q8_0", "ffn_up.weight": "F16"}
    path = gguf_from_directory(path, tmp_path / "model.gguf", "Q4_0", kinds=kinds)
    native, layered = load(path), load(path, runtime="torch")
    assert (type(native).__name__, type(layered.body).__name__) == ("NativeDecoder", "TorchDecoder")
    assert torch.equal(logits_of(layered, TEXT, chunk=9), logits_of(native, TEXT, chunk=9))


# ---------------------------------------------------------------- GGUF


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_dense_gguf_equals_its_directory(tmp_path: Path, family: str, kind: str) -> None:
    dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[kind]
    path = make_tiny(tmp_path / "hf", family, dtype=dtype)
    model = load(gguf_from_directory(path, tmp_path / "model.gguf", kind))
    torch.testing.assert_close(logits_of(model, TEXT), logits_of(load(path), TEXT), rtol=0, atol=1e-5)
    if kind == "F32":
        assert_parity(path, model)


def int8_activations(model: Any) -> Any:
    """Rounds the inputs of every linear layer of a reference model to int8 per 32 values, as the kernels do."""

    def round_input(_module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x = arguments[0].unflatten(-1, (-1, 32))
        scale = x.abs().amax(-1, keepdim=True) / 127
        return ((torch.round(x / scale.clamp(min=1e-30)) * scale).flatten(-2),)

    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not module._forward_pre_hooks:
            module.register_forward_pre_hook(round_input)
    return model


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_quantized_gguf_equals_its_expansion(tmp_path: Path, family: str, kind: str) -> None:
    """Reference: transformers on the values in the blocks (expanded by the gguf package), activations rounded alike."""
    import gguf

    path = make_tiny(tmp_path / "hf", family, tie_word_embeddings=family == "qwen2")
    model = load(gguf_from_directory(path, tmp_path / "model.gguf", kind))
    weights = load_file(path / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.ndim == 2:
            kind_id = gguf.GGMLQuantizationType[kind]
            stored = gguf.quants.quantize(tensor.numpy(), kind_id)
            weights[name] = torch.from_numpy(gguf.quants.dequantize(stored, kind_id))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    expected = reference(path)
    logits = reference_logits(int8_activations(expected), TEXT)
    error = (logits_of(model, TEXT) - logits).abs()
    # a value on the border between two int8 steps may fall to either side, which moves a few logits a little
    assert error.mean() < 0.1
    assert error.max() < 1.5
    assert {weight.kind for layer in model.weights.layers for weight in layer.gate_up.weights} == {kind}
    assert torch.equal(logits_of(RankedModel(tmp_path / "model.gguf", tp=2, pp=2), TEXT), logits_of(model, TEXT))


def test_gguf_that_mixes_kinds(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "hf")
    kinds = {"attn_v.weight": "Q8_0", "ffn_up.weight": "F16", "token_embd.weight": "Q8_0"}
    model = load(gguf_from_directory(path, tmp_path / "model.gguf", "F32", kinds=kinds))
    error = (logits_of(model, TEXT) - logits_of(load(path), TEXT)).abs()
    assert 0 < error.mean() < 1.0
    assert [weight.kind for weight in model.weights.layers[0].qkv.weights] == ["F32", "Q8_0"]


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    for kind, extra in (
        ("linear", {}),
        ("yarn", {"llama__rope__scaling__original_context_length": 64}),
    ):
        rope = {"rope_type": kind, "factor": 4.0} | ({"original_max_position_embeddings": 64} if extra else {})
        path = make_tiny(tmp_path / kind, max_position_embeddings=256, rope_scaling=rope)
        options = {"llama__rope__scaling__type": kind, "llama__rope__scaling__factor": 4.0, **extra}
        model = load(gguf_from_directory(path, tmp_path / f"{kind}.gguf", **options))
        torch.testing.assert_close(logits_of(model, TEXT), logits_of(load(path), TEXT), rtol=0, atol=LOGITS_BOUND)


def test_gguf_llama3_rope_comes_as_divisors(tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    path = make_tiny(tmp_path / "hf", max_position_embeddings=256, rope_scaling={"rope_type": "llama3", **rope})
    spec = read_arch(path).rope
    divisors = inverse_frequencies(RopeSpec(dim=spec.dim)) / inverse_frequencies(spec)
    assert divisors.max() == 8.0
    tensors = {"rope_freqs.weight": torch.from_numpy(divisors)}
    model = load(gguf_from_directory(path, tmp_path / "model.gguf", tensors=tensors))
    torch.testing.assert_close(logits_of(model, TEXT), logits_of(load(path), TEXT), rtol=0, atol=LOGITS_BOUND)


# ---------------------------------------------------------------- refusals


def test_missing_weight_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    change(path, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_unused_weight_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    change(path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(path)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    change(path, **{"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 127)})
    with pytest.raises(ModelError, match=r"down_proj\.weight .*\[64, 127\].*\[64, 128\]"):
        load(path)


def test_wrong_dtype_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    change(path, **{"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 128, dtype=torch.int8)})
    with pytest.raises(ModelError, match="int8"):
        load(path)


def test_index_cannot_leave_its_directory(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model", shards=2)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "../secret.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="not a file of its directory"):
        load(path)


def test_cut_short_safetensors_is_an_error(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(path)


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    """S7: a directory whose config asks for its own code, and whose pickles would run some, loads as plain data."""
    path = make_tiny(tmp_path / "model")
    trap = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()"
    for name in ("modeling_trap", "configuration_trap", "tokenization_trap"):
        (path / f"{name}.py").write_text(trap)
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_trap.C", "AutoModelForCausalLM": "modeling_trap.M"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch ran'\ntR.")
    load(path)
    assert not (path / "ran").exists()
    config["model_type"] = "trap"
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="'trap'; supported types are llama"):
        load(path)


def test_pickle_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "pickle" in caught.value.hint


def test_progress_counts_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    files = find_model(make_tiny(tmp_path))
    load_model(files, read_arch(files), SOLO, SoloGroup(), progress=lambda *step: seen.append(step))
    assert seen == [("weights", done, 3) for done in range(4)]

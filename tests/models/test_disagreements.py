"""Where a config.json (or a GGUF file's metadata) and the tensors beside it say different things: the tensors are followed, or the
model is refused by name. Nothing that would change the answer is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.drive import load, logits_of
from tests.models.test_families_more import make as make_more
from tests.models.test_parity import LOGITS_BOUND, reference, reference_logits
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from tests.models.tiny_packed import compressed_config, gptq_config, make_packed
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.load import open_checked
from trireme.models.weights.sources import GgufSource

TEXT = [256, *range(30, 70)]
Tensors = dict[str, torch.Tensor]


def tensors_of(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")


def write(path: Path, weights: Tensors, **config: Any) -> Path:
    """Puts these tensors and config.json fields into a checkpoint."""
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})
    old = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**old, **config}))
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_checked(files := find_model(path), read_arch(files))


# ---------------------------------------------------------------- the head


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_of_its_own_wins_over_a_config_that_ties_it(tmp_path: Path, dtype: str) -> None:
    path = make_tiny(tmp_path, dtype=dtype)
    expected = reference_logits(reference(path), TEXT)
    write(path, tensors_of(path), tie_word_embeddings=True)
    model = load(path)
    assert not read_arch(path).tie_embeddings
    bound = LOGITS_BOUND if dtype == "float32" else 0.5
    torch.testing.assert_close(logits_of(model, TEXT), expected.float(), rtol=0, atol=bound)


def test_a_head_that_is_the_embedding_once_more_is_held_once(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    weights = tensors_of(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    expected = logits_of(load(write(path, weights)), TEXT)
    model = load(write(path, weights, tie_word_embeddings=True))
    assert model.weights.head is model.weights.embedding
    assert torch.equal(logits_of(model, TEXT), expected)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_a_head_of_its_own_wins_in_every_body(tmp_path: Path, name: str) -> None:
    path = make_more(tmp_path, name, tie_word_embeddings=False)
    expected = logits_of(load(path), TEXT)
    assert torch.equal(logits_of(load(write(path, tensors_of(path), tie_word_embeddings=True)), TEXT), expected)


# ---------------------------------------------------------------- numbers


def test_the_type_of_numbers_is_that_of_the_files(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, dtype="float32")
    for claim in ("bfloat16", None):
        write(path, tensors_of(path), torch_dtype=claim)
        assert read_arch(path).weights_dtype == "float32"
    weights = {name: tensor.bfloat16() for name, tensor in tensors_of(path).items()}
    assert read_arch(write(path, weights, torch_dtype="float16")).weights_dtype == "bfloat16"


def test_quantized_matrices_and_their_config_come_together(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "claimed")
    group = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}
    claim = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    refused(write(path, tensors_of(path), quantization_config=claim), "tells of FP8 weights; the files hold none")
    path = make_tiny(tmp_path / "silent")
    weights = tensors_of(path)
    name = "model.layers.0.mlp.up_proj.weight"
    weights |= {name: weights[name].to(torch.float8_e4m3fn), name + "_scale": torch.ones(128, 1)}
    refused(write(path, weights), f"does not tell of FP8 weights; {name} is one")


def test_two_scales_of_one_matrix(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    weights, name = tensors_of(path), "model.layers.0.mlp.up_proj.weight"
    weights |= {name: weights[name].to(torch.float8_e4m3fn)}
    weights |= {name + "_scale": torch.ones(128, 1), name + "_scale_inv": torch.ones(1, 1)}
    files = find_model(write(path, weights, quantization_config={"quant_method": "fp8"}))
    source = open_checked(files, read_arch(files))
    with pytest.raises(ModelError, match="has two scales"):
        source.matrix(name, 128, 64)


# ---------------------------------------------------------------- packed integers


def relabelled(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("written", "label"), [("gptq", "gptq_v2"), ("gptq_v2", "gptq")])
def test_zeros_of_symmetric_gptq_are_known_whatever_the_label(
    tmp_path: Path, bits: int, written: str, label: str
) -> None:
    packed, dense = make_packed(tmp_path, gptq_config(bits, sym=True, checkpoint_format=written))
    files = find_model(relabelled(packed, checkpoint_format=label))
    source, twin = open_checked(files, read_arch(files)), tensors_of(dense)
    for name in (name for name in twin if "_proj.weight" in name):
        np.testing.assert_array_equal(source.matrix(name, *twin[name].shape).as_float32(), twin[name].numpy())


def test_gptq_that_is_called_symmetric_and_is_not(tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, gptq_config(sym=False))
    with pytest.raises(ModelError, match=r"qzeros .* holds zeros of .*; sym true in quantization_config means 8"):
        load(relabelled(packed, sym=True))


def test_zeros_that_a_config_does_not_tell_of_count(tmp_path: Path) -> None:
    packed, dense = make_packed(tmp_path, compressed_config(sym=False))
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (packed / "config.json").write_text(json.dumps(config))
    files = find_model(packed)
    name, twin = "model.layers.0.mlp.up_proj.weight", tensors_of(dense)
    found = open_checked(files, read_arch(files)).matrix(name, *twin[name].shape).as_float32()
    np.testing.assert_array_equal(found, twin[name].numpy())


def test_groups_that_a_config_does_not_tell_of_count(tmp_path: Path) -> None:
    packed, dense = make_packed(tmp_path, compressed_config(actorder="group"))
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = None
    (packed / "config.json").write_text(json.dumps(config))
    files = find_model(packed)
    name, twin = "model.layers.0.mlp.up_proj.weight", tensors_of(dense)
    found = open_checked(files, read_arch(files)).matrix(name, *twin[name].shape).as_float32()
    np.testing.assert_array_equal(found, twin[name].numpy())


def test_the_stored_shape_of_packed_weights(tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, compressed_config())
    weights = tensors_of(packed)
    weights["model.layers.0.mlp.up_proj.weight_shape"] = torch.tensor([320, 120])
    write(packed, weights)
    with pytest.raises(ModelError, match=r"weight_shape .* says \[320, 120\]; config.json asks for \[320, 128\]"):
        load(packed)


# ---------------------------------------------------------------- tensors that nobody reads


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.self_attn.q_proj.bias", (64,)),
        ("model.layers.0.self_attn.q_norm.weight", (16,)),
        ("model.layers.0.self_attn.k_scale", (1,)),
        ("model.layers.2.input_layernorm.weight", (64,)),
        ("lm_head.bias", (320,)),
        ("rope_factors_long.weight", (8,)),
    ],
)
def test_a_tensor_that_the_config_does_not_tell_of_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    path = make_tiny(tmp_path)
    refused(write(path, tensors_of(path) | {name: torch.ones(shape)}), f"does not use: {name}")


def test_a_layer_less_in_the_config_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    refused(write(path, tensors_of(path), num_hidden_layers=1), r"does not use: model\.layers\.1\.")


@pytest.mark.parametrize(
    ("theta", "stored"), [(10000.0, torch.float32), (10000.0, torch.bfloat16), (500000.0, torch.float16)]
)
def test_stored_frequencies_that_follow_from_the_config_are_left_out(
    tmp_path: Path, theta: float, stored: torch.dtype
) -> None:
    path = make_tiny(tmp_path, rope_theta=theta)
    expected = logits_of(load(path), TEXT)
    frequencies = (theta ** -(torch.arange(0, 16, 2) / 16)).to(stored)
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    write(path, tensors_of(path) | {name: frequencies.clone() for name in names})
    assert torch.equal(logits_of(load(path), TEXT), expected)
    scaling = {"rope_type": "linear", "factor": 4.0}
    load(write(path, tensors_of(path), rope_scaling=scaling))  # (they were stored without the scaling)


def test_stored_frequencies_of_another_base_are_refused(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, rope_theta=10000.0)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = tensors_of(path) | {name: 500000.0 ** -(torch.arange(0, 16, 2) / 16)}
    refused(write(path, weights), f"{name} in .* has other frequencies than the rotary settings give")


def test_two_weights_with_one_name_are_refused(tmp_path: Path) -> None:
    """A prefix that some names have, a newer name, a fused matrix beside its parts, a matrix packed and whole."""
    path = make_more(tmp_path / "gpt2", "gpt2")
    weights = tensors_of(path)
    weights["wpe.weight"] = weights["transformer.wpe.weight"] + 1
    refused(write(path, weights), r"holds transformer\.wpe\.weight and wpe\.weight, which are the same weight")
    path = make_tiny(tmp_path / "baichuan")
    weights = tensors_of(path)
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn."
        weights[at + "W_pack.weight"] = torch.cat([weights[at + f"{side}_proj.weight"] for side in "qkv"])
    refused(write(path, weights, model_type="baichuan"), "which are the same weight")
    packed, dense = make_packed(tmp_path / "packed", gptq_config())
    name = "model.layers.0.mlp.up_proj.weight"
    refused(write(packed, tensors_of(packed) | {name: tensors_of(dense)[name]}), f"holds {name} twice")


# ---------------------------------------------------------------- rotary settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}}, "rope_scaling has alpha"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "types linear and yarn at once"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            r"rope_theta 500000.0, elsewhere it is 10000.0",
        ),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            },
            "factor 2.0, elsewhere it is 4.0",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "rope factor is 1e[+]300"),
        (
            {
                "original_max_position_embeddings": 512,
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024},
            },
            "original_max_position_embeddings is 512, and 1024 in its rope scaling",
        ),
        ({"rope_theta": 1e300}, "rope theta is 1e[+]300"),
        ({"rope_theta": 1e-300}, "rope theta is 1e-300"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1e9}}, "attention_factor is"),
        (
            {"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention", "linear_attention"]},
            "linear_att",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "1 no_rope_layers for 2 layers"),
        ({"model_type": "mistral", "sliding_window": 1 << 63}, "sliding window of 9223372036854775808"),
        ({"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
    ],
)
def test_settings_that_contradict_themselves_or_are_absurd(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = make_tiny(tmp_path)
    refused(write(path, tensors_of(path), **changes), message)


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_numbers_that_are_not_finite_name_file_and_field(tmp_path: Path, number: str) -> None:
    path = make_tiny(tmp_path)
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"rope_theta": 10000.0', f'"rope_theta": {number}'))
    refused(path, r"config\.json: rope_theta is -?(inf|nan)")
    (path / "config.json").write_text(text[:-1] + f', "rope_scaling": {{"rope_type": "linear", "factor": {number}}}}}')
    refused(path, r"config\.json: rope_scaling\.factor is -?(inf|nan)")


# ---------------------------------------------------------------- GGUF


def test_gguf_without_a_scaling_type_scales_by_its_factor_and_with_none_does_not(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "plain")
    factor = {"llama__rope__scaling__factor": 4.0}
    alone = gguf_from_directory(directory, tmp_path / "alone.gguf", **factor)
    none = gguf_from_directory(directory, tmp_path / "none.gguf", llama__rope__scaling__type="none", **factor)
    assert (read_arch(alone).rope.kind, read_arch(alone).rope.factor) == ("linear", 4.0)
    assert (read_arch(none).rope.kind, read_arch(none).rope.factor) == ("default", 1.0)
    torch.testing.assert_close(logits_of(load(none), TEXT), logits_of(load(directory), TEXT), rtol=0, atol=LOGITS_BOUND)


def test_gguf_tensors_that_would_have_one_name_are_refused(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "plain")
    extra = {"blk.0.post_attention_norm.weight": torch.ones(64)}
    path = gguf_from_directory(directory, tmp_path / "twice.gguf", tensors=extra)
    with pytest.raises(ModelError, match=r"holds blk\.0\.ffn_norm\.weight and blk\.0\.post_attention_norm\.weight"):
        GgufSource(path)
    short = gguf_from_directory(
        directory, tmp_path / "short.gguf", tensors={"rope_factors_short.weight": torch.ones(8)}
    )
    refused(short, "does not use: rope_factors_short.weight")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("logit_scale", 0.25, r"llama\.logit_scale is 0\.25, which is not supported for llama"),
        ("attention__clamp_kqv", 8.0, r"llama\.attention\.clamp_kqv is 8\.0"),
        ("final_logit_softcapping", 30.0, r"llama\.final_logit_softcapping is 30\.0"),
        ("attention__scale", 0.5, r"llama\.attention\.scale is 0\.5"),
        ("attention__causal", False, r"llama\.attention\.causal is False"),
        ("rope__scaling__attn_factor", 1.5, r"attn_factor is supported with yarn and longrope, not with default"),
    ],
)
def test_gguf_keys_that_would_change_the_answer_are_named(tmp_path: Path, key: str, value: Any, said: str) -> None:
    directory = make_tiny(tmp_path / "plain")
    refused(gguf_from_directory(directory, tmp_path / "x.gguf", **{f"llama__{key}": value}), said)


def test_gguf_keys_that_change_nothing_are_let_pass(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "plain")
    keys = {"logit_scale": 1.0, "attention__scale": 0.25, "attention__causal": True, "rope__scaling__attn_factor": 1.0}
    path = gguf_from_directory(
        directory, tmp_path / "x.gguf", **{f"llama__{key}": value for key, value in keys.items()}
    )
    torch.testing.assert_close(logits_of(load(path), TEXT), logits_of(load(directory), TEXT), rtol=0, atol=LOGITS_BOUND)

"""Whole models with int8 weights: rounded at load (`--quantize int8`) and stored so by compressed-tensors; how far they are from
the dense model, and that `trireme plan` counts the bytes that a load takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.drive import RankedModel, greedy, load, logits_of
from tests.models.test_parity import reference, reference_logits
from tests.models.tiny import make_tiny
from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.launch.cli import main
from trireme.machine.weight_bytes import loaded_bytes, stored_bytes
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.load import open_weights
from trireme.models.weights.packed import SCHEMES

TEXT = [(7 * i * i + 11 * i) % 250 + 5 for i in range(120)]
BYTES = {"num_bits": 8, "type": "int", "symmetric": True}
GROUP = {
    "targets": ["Linear"],
    "weights": {**BYTES, "strategy": "channel", "dynamic": False},
    "input_activations": {**BYTES, "strategy": "token", "dynamic": True},
}


def compressed(path: Path, strategy: str = "channel", **changes: Any) -> Path:
    """Turns a dense tiny checkpoint into one of compressed-tensors: int8 layers, the embedding and the head left alone."""
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        magnitudes = weights[name].float().abs()
        scale = (magnitudes.amax(1, keepdim=True) if strategy == "channel" else magnitudes.max().view(1)) / 127
        weights[name] = torch.round(weights[name].float() / scale).to(torch.int8)
        weights[name + "_scale"] = scale
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**GROUP, "weights": {**GROUP["weights"], "strategy": strategy}}},
        **changes,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def matrix_kinds(model: Any) -> set[str]:
    linears = [part for layer in model.weights.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return {weight.kind for linear in linears for weight in linear.weights}


def rounded_reference(path: Path) -> Any:
    """transformers on weights rounded per row, the inputs of its linear layers rounded per token, all in float32."""
    model = reference(path)

    def rounded(values: Tensor, *, is_weight: bool) -> Tensor:
        largest = values.abs().amax(-1, keepdim=True)
        steps = values / largest * 127 if is_weight else values * (127 / largest)
        return torch.round(steps) * (largest / 127)

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.weight.data = rounded(module.weight.data, is_weight=True)
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], is_weight=False),))
    return model


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounded_model_is_near_the_dense_one(tmp_path: Path, family: str, dtype: str) -> None:
    """Teacher-forced. The logits are those of an emulation, but where a value on the border of two steps falls to the other side
    (and then all that follows differs a little); so they are as far from the dense model's as the scheme is, within 10 %."""
    path = make_tiny(tmp_path, family, dtype=dtype, tie_word_embeddings=True)
    model = load(path, quantize="int8")
    assert matrix_kinds(model) == {"INT8"}
    assert model.weights.head is model.weights.embedding
    assert model.weights.head.weights[0].kind == "INT8"
    dense, logits = logits_of(load(path), TEXT), logits_of(model, TEXT)
    emulated = reference_logits(rounded_reference(path), TEXT)
    assert (logits - emulated)[:4].abs().max() < 1e-3, "of so few values none should be on a border"
    assert rms(logits - emulated) < 0.7 * rms(emulated - dense)
    assert 0 < rms(logits - dense) < 1.1 * rms(emulated - dense)
    assert (logits.argmax(-1) == dense.argmax(-1)).double().mean() > 0.9


def test_one_request_alone_is_one_in_a_batch_and_over_ranks(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    model = load(path, quantize="int8")
    prompts = [TEXT[:7], TEXT[20:60], TEXT[3:4]]
    together = greedy(model, prompts, 12)
    assert together == [greedy(model, [prompt], 12, chunk=5)[0] for prompt in prompts]
    assert torch.equal(logits_of(RankedModel(path, tp=2, pp=2, quantize="int8"), TEXT), logits_of(model, TEXT))


def test_stored_int8_is_what_rounding_gives(tmp_path: Path) -> None:
    """Same weights but for the embedding and the head, which such a checkpoint leaves dense; --quantize rounds those too."""
    dense = make_tiny(tmp_path / "dense")
    stored = compressed(make_tiny(tmp_path / "stored"))
    model = load(stored)
    assert matrix_kinds(model) == {"INT8"}
    assert model.weights.head.weights[0].kind == "F32"
    assert torch.equal(logits_of(load(stored, quantize="int8"), TEXT), logits_of(load(dense, quantize="int8"), TEXT))


def test_one_scale_for_a_whole_matrix(tmp_path: Path) -> None:
    """Exactly the stored values; logits as near to those of one scale for each channel as its coarser steps are."""
    path = compressed(make_tiny(tmp_path / "tensor"), "tensor")
    files = find_model(path)
    stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    n, k = stored[name].shape
    matrix = open_weights(files, read_arch(files)).matrix(name, n, k)
    assert matrix.kind == "INT8"
    assert torch.equal(torch.from_numpy(matrix.as_float32()), stored[name].float() * stored[name + "_scale"])
    model = load(path)
    assert matrix_kinds(model) == {"INT8"}
    logits = logits_of(model, TEXT)
    channels = logits_of(load(compressed(make_tiny(tmp_path / "channel"))), TEXT)
    assert 0 < rms(logits - channels) < 0.1 * rms(channels)


STATIC = {**BYTES, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config_groups": {"g": {**GROUP, "input_activations": STATIC}}},
            r"dynamic False of the input_activations of g",
        ),
        (
            {
                "config_groups": {
                    "g": {**GROUP, "input_activations": {**GROUP["input_activations"], "symmetric": False}}
                }
            },
            r"symmetric False of the input_activations",
        ),
        (
            {"config_groups": {"g": {**GROUP, "weights": {**GROUP["weights"], "symmetric": False}}}},
            r"symmetric False of the weights",
        ),
        ({"config_groups": {"g": {**GROUP, "output_activations": STATIC}}}, "output_activations of g"),
        ({"transform_config": {"config_groups": {"u": {}}}}, "transforms"),
        ({"quant_method": "bitsandbytes"}, r"quantized weights \(bitsandbytes\)"),
        (
            {"config_groups": {"g": {**GROUP, "input_activations": None}}},
            r"num_bits None of the input_activations of g",
        ),
        (
            {"config_groups": {"g": {**GROUP, "weights": {**BYTES, "strategy": "group"}}}},
            r"strategy 'group' of the weights",
        ),
        ({"config_groups": {"g": {**GROUP, "weights": {**BYTES, "num_bits": 4}}}}, r"num_bits 4 of the weights"),
        ({"config_groups": {}}, "no config_groups"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "a scheme for the KV cache"),
        ({"sparsity_config": {"format": "sparse-24"}}, r"sparse weights \(sparse-24\)"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = compressed(make_tiny(tmp_path), **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load(path)
    assert "unquantized checkpoint" in caught.value.hint


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_commands_know_such_checkpoints(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = compressed(make_tiny(tmp_path, dtype="bfloat16"), strategy)
    assert main(["plan", str(path), "--json"]) == 0
    share = json.loads(capsys.readouterr().out)["memory"][0]
    weights = load(path).weights
    taken = sum(part.nbytes for part in (*weights.layers, weights.head, weights.embedding))
    assert share["what"] == "weights"
    assert share["total"] == pytest.approx(taken, rel=0.1), "of so small matrices many scales, and a header"
    assert main(["models", "inspect", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"]
    assert facts["shape"]["weights_kind"] == "INT8"


def test_commands_refuse_static_activations_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = compressed(make_tiny(tmp_path), config_groups={"g": {**GROUP, "input_activations": STATIC}})
    assert main(["plan", str(path)]) != 0
    told = capsys.readouterr().err
    assert "dynamic False of the input_activations of g, not True" in told
    assert "--quantize int8" in told


def test_int8_without_scales_is_refused(tmp_path: Path) -> None:
    path = compressed(make_tiny(tmp_path))
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight in .* has no scales"):
        load(path)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_the_plan_counts_what_a_load_takes(tmp_path: Path, scheme: str | None, tied: bool) -> None:
    path = make_tiny(tmp_path, dtype="bfloat16", tie_word_embeddings=tied)
    files = find_model(path)
    weights = load(path, quantize=scheme).weights
    ends = {id(end): end.nbytes for end in (weights.head, weights.embedding)}
    taken = sum(layer.nbytes for layer in weights.layers) + sum(ends.values())
    planned = loaded_bytes(ModelConfig(model=str(path), quantize=scheme), read_arch(files), stored_bytes(files)[0])
    if scheme is None:
        assert taken < planned < taken * 1.03, "the file also has a header and the norms"
    else:
        assert planned == taken

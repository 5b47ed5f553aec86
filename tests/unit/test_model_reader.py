"""Models are found by name, file or directory, and config.json becomes a shape or an error that names the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_stub, make_tiny, tiny_config
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.model.reader import ArchSpec, arch_from_config, read_arch


def arch_of(family: str = "llama", generation: dict[str, Any] | None = None, **changes: Any) -> ArchSpec:
    return arch_from_config(tiny_config(family, **changes), generation or {}, Path("config.json"))


def test_packaged_model_is_found_by_name() -> None:
    files = find_model("SmolLM2")
    assert (files.kind, files.name) == ("gguf", "smollm2")
    arch = read_arch(files)
    assert (arch.num_layers, arch.hidden, arch.num_heads, arch.num_kv_heads) == (30, 576, 9, 3)
    assert (arch.vocab_size, arch.max_position, arch.rope.theta) == (49152, 8192, 100000.0)
    assert arch.tie_embeddings
    assert arch.eos_token_ids == (2,)


def test_directories_and_files_are_told_apart(tmp_path: Path) -> None:
    assert find_model(make_tiny(tmp_path / "hf")).kind == "safetensors"
    assert find_model(make_stub(tmp_path / "stub")).kind == "stub"
    one = tmp_path / "one"
    one.mkdir()
    (one / "a.gguf").touch()
    assert find_model(one).path == one / "a.gguf"
    assert find_model(one / "a.gguf").name == "a"
    (one / "b.gguf").touch()
    with pytest.raises(ModelError, match="2 GGUF files: a.gguf, b.gguf"):
        find_model(one)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "nowhere", "no model .*smollm2"),
        (lambda path: path, "neither config.json nor"),
        (lambda path: path / "file.bin", "not a .gguf file"),
    ],
)
def test_what_was_looked_for_is_said(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "file.bin").touch()
    with pytest.raises(ModelError, match=message):
        find_model(make(tmp_path))


def test_end_tokens_come_from_both_files() -> None:
    assert arch_of(generation={"eos_token_id": [5, 257]}).eos_token_ids == (5, 257)
    assert arch_of(eos_token_id=[7, 8], bos_token_id=None).eos_token_ids == (7, 8)
    assert arch_of(eos_token_id=None).eos_token_ids == ()


def test_windows_of_each_family() -> None:
    assert arch_of("mistral", sliding_window=64).sliding_window == 64
    assert arch_of("mistral").sliding_window is None
    config = tiny_config("mistral")
    del config["sliding_window"]
    assert arch_from_config(config, {}, Path("c")).sliding_window == 4096
    qwen = {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
    assert arch_of("qwen2", **qwen).full_attention_layers == (0,)
    assert arch_of("qwen2", **(qwen | {"use_sliding_window": False})).sliding_window is None
    assert arch_of("qwen2", **(qwen | {"max_window_layers": 2})).sliding_window is None
    mixed = arch_of("qwen3", **qwen, layer_types=["sliding_attention", "full_attention"])
    assert mixed.full_attention_layers == (1,)
    assert arch_of("llama", sliding_window=64).sliding_window is None


def test_yarn_lengthens_the_model() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert arch_of(max_position_embeddings=1024, rope_scaling=rope).max_position == 4096
    scaled = rope | {"mscale": 1.0, "mscale_all_dim": 0.8}
    assert arch_of(rope_scaling=scaled).rope.attention_factor == pytest.approx(1.0249579608)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": -1}, r"hidden_size"),
        ({"hidden_size": "64", "head_dim": 16}, r"hidden_size"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers"),
        ({"hidden_act": "gelu"}, r"'gelu'; silu"),
        ({"num_key_value_heads": 3}, r"4 heads are not a multiple of 3"),
        ({"head_dim": 12}, r"head_dim 12"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"hqq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"group_size None .*supported: -1 or 32"),
        ({"rope_scaling": {"rope_type": "spiral"}}, r"'spiral'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, r"needs 8 short and long factors"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"rope_scaling\.factor"),
        ({"eos_token_id": 320}, r"320 is outside the vocabulary"),
        ({"model_type": "deepseek_v3"}, r"'deepseek_v3'; supported types are llama, mistral, qwen2, qwen3"),
    ],
)
def test_impossible_shapes_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        arch_of(**changes)


def test_broken_config_is_a_model_error(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    for content in ("{", "[]", "[" * 100000, "\udcff"):
        (path / "config.json").write_text(content, errors="surrogateescape")
        with pytest.raises(ModelError, match=r"config\.json"):
            read_arch(path)


def test_stub_shape_carries_its_settings(tmp_path: Path) -> None:
    arch = read_arch(make_stub(tmp_path, extra=["ab"], scripts=[["ab", 5]]))
    assert arch.family == "stub"
    assert arch.vocab_size == 260
    assert arch.stub["scripts"] == [[259, 5]]
    assert json.dumps(arch.stub)

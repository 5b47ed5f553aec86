"""Dummy weights: a model of the right shape from config.json alone, and where they are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.models.tiny import tiny_config, write_byte_tokenizer
from trireme import LLM, SamplingParams
from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.machine.weight_bytes import loaded_bytes
from trireme.model.files import files_of, find_model
from trireme.model.reader import read_arch


def write_config(directory: Path, **changes: object) -> Path:
    (directory / "config.json").write_text(json.dumps(tiny_config(**changes)))
    write_byte_tokenizer(directory, size=320)
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_runs_without_a_models_files(tmp_path: Path, dtype: str) -> None:
    model = write_config(tmp_path, torch_dtype=dtype)
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with LLM(model, load_format="dummy", max_len=64, kv_memory="4MiB", threads=1) as llm:
        assert len(llm.generate([[1, 2, 3]], greedy)[0].outputs[0].token_ids) == 4


def test_without_dummy_weights_files_are_missed(tmp_path: Path) -> None:
    model = write_config(tmp_path)
    with pytest.raises(ModelError, match="no \\*.safetensors"):
        find_model(model)
    arch = read_arch(files_of(ModelConfig(model=str(model), load_format="dummy")))
    asked = ModelConfig(load_format="dummy", dtype="float32")
    params = 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 128) + 2 * 320 * 64
    assert loaded_bytes(asked, arch, 0) == 4 * params


def test_values_are_small_norms_neutral_and_biases_zero(tmp_path: Path) -> None:
    from trireme.models.weights.dummy import DummySource

    arch = read_arch(files_of(ModelConfig(model=str(write_config(tmp_path)), load_format="dummy")))
    source = DummySource(arch, ["w.weight"], tmp_path)
    values = source.matrix("w.weight", 33, 70).as_float32()
    assert values.shape == (33, 70)
    assert 0.015 < values.std() < 0.025
    assert (source.vector("model.norm.weight", 5) == 1.0).all()
    assert not source.vector("q_proj.bias", 5).any()
    assert np.array_equal(values, source.matrix("w.weight", 33, 70).as_float32())


def test_families_with_other_bodies_are_refused(tmp_path: Path) -> None:
    from trireme.models.load import open_checked

    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 320, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = files_of(ModelConfig(model=str(tmp_path), load_format="dummy"))
    with pytest.raises(ModelError, match="dummy does not know the weights of gpt2"):
        open_checked(files, read_arch(files), dummy=True)

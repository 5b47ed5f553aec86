"""Files of a model that are damaged, replaced or missing: a ModelError that names the file, never another error and no hang."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.drive import load
from tests.models.tiny import make_tiny
from trireme.config import EngineConfig, ModelConfig
from trireme.errors import ModelError, TriremeError
from trireme.launch.commands.inspect_model import inspect_files
from trireme.model.files import find_model, read_json
from trireme.model.reader import read_arch
from trireme.model.stored import read_header
from trireme.models.forward import SoloGroup
from trireme.models.load import load_model
from trireme.resolve import prepare
from trireme.serving.text.tokens import load_tokenizer
from trireme.topology.mesh import Mesh


def start(path: Path) -> None:
    """What reads the files of a model when a server starts, and what shows them."""
    prepare(EngineConfig(model=ModelConfig(model=str(path))))
    files = find_model(path)
    load_model(files, read_arch(files), Mesh(1, 1, 1), SoloGroup(), max_len=64)
    load_tokenizer(files)
    inspect_files(files)


def test_every_byte_of_a_header_may_be_broken(tmp_path: Path) -> None:
    """Each byte in turn becomes one that no UTF-8 begins with, one that ends a string, and a bracket."""
    file = make_tiny(tmp_path, num_hidden_layers=1) / "model.safetensors"
    raw = file.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    refusals: list[str] = []
    for at in range(length):
        for value in (0x80, 0xFF, ord('"'), ord("{")):
            with file.open("r+b") as out:
                out.seek(at)
                out.write(bytes([value]))
            try:
                read_header(file)
            except ModelError as error:
                refusals.append(error.message)
        with file.open("r+b") as out:
            out.seek(at)
            out.write(raw[at : at + 1])
    assert len(refusals) > 3 * length
    assert all(str(file) in message for message in refusals)
    read_header(file)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_broken_bytes_give_typed_errors_alone(tmp_path: Path, name: str) -> None:
    path, rng = make_tiny(tmp_path, shards=2), random.Random(7)
    (path / "generation_config.json").write_text('{"eos_token_id": [257]}')
    raw = (path / name).read_bytes()
    end = min(len(raw), 6000)
    for _ in range(60):
        changed = bytearray(raw)
        changed[rng.randrange(end)] = rng.randrange(256)
        (path / name).write_bytes(changed)
        with contextlib.suppress(TriremeError):
            start(path)
    (path / name).write_bytes(raw)
    start(path)


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "torch_dtype": "\ud800"}))
    with pytest.raises(ModelError, match=r"config\.json holds a string that is not Unicode"):
        start(path)
    (path / "whole.json").write_text('{"a": "\\ud83d\\ude80"}')
    assert read_json(path / "whole.json") == {"a": "\U0001f680"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "generation_config.json", "model.safetensors.index.json", "tokenizer_config.json"]
)
def test_a_link_whose_target_was_cleaned_away(tmp_path: Path, name: str) -> None:
    path = make_tiny(tmp_path / "model")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(tmp_path / "blobs/4f1c")
    with pytest.raises(ModelError, match=f"cannot read .*{name}") as caught:
        start(path)
    assert "blobs/4f1c" in caught.value.hint


def test_a_shard_whose_target_was_cleaned_away(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model", shards=2)
    shard = path / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(tmp_path / "blobs/4f1c")
    with pytest.raises(ModelError, match=r"names model-00002-of-00002\.safetensors, which is missing") as caught:
        start(path)
    assert "blobs/4f1c" in caught.value.hint


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    """A pipe that nobody writes to would wait for ever: a process of its own, with a limit."""
    path = make_tiny(tmp_path / "model")
    for name in ("model.safetensors", "generation_config.json"):
        kept = (path / name).read_bytes() if (path / name).exists() else None
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
        found = subprocess.run(
            [sys.executable, "-m", "trireme.launch.cli", "plan", str(path)], capture_output=True, text=True, timeout=60
        )
        assert (found.returncode, "Traceback" in found.stderr) == (3, False)
        assert f"{name} is not a regular file" in found.stderr
        (path / name).unlink()
        if kept is not None:
            (path / name).write_bytes(kept)
    os.mkfifo(tmp_path / "alone.gguf")
    with pytest.raises(ModelError):
        start(tmp_path)


def test_files_that_the_index_does_not_name_are_not_counted(tmp_path: Path) -> None:
    """Some checkpoints lie in their directory twice, the second time under names of their own."""
    path = make_tiny(tmp_path)
    size = (path / "model.safetensors").stat().st_size
    (path / "consolidated.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    assert prepare(EngineConfig(model=ModelConfig(model=str(path)))).model.weight_bytes == size
    load(path)

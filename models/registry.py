"""Table of model families: which body computes a family, and how its files differ. Used by models.load only."""

from __future__ import annotations

from typing import NamedTuple

from trireme.errors import ModelError


class Family(NamedTuple):
    """`gguf_pairs`: GGUF converters store q and k rows of this family in interleaved rotary order."""

    gguf_pairs: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(gguf_pairs=True),
    "mistral": Family(gguf_pairs=True),
    "qwen2": Family(),
    "qwen3": Family(),
}


def family_named(name: str) -> Family:
    """The row of a family. Raises ModelError that lists the supported ones."""
    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]

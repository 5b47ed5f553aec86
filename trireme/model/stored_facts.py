"""Reconciles config.json with a checkpoint's files: the files win, or the model is rejected by name.

Called by trireme.model.reader once config.json is read. Reads headers, and the bytes of a possibly tied head; imports no numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from trireme.errors import ModelError
from trireme.model.spec import ArchSpec
from trireme.model.stored import DTYPES, Placed, have_same_bytes, stored_tensors

_FLOATS = ("F32", "F16", "BF16")
_PREFIXES = ("", "model.", "transformer.", "gpt_neox.", "language_model.", "language_model.model.")
_HEADS = ("lm_head", "embed_out", "output")
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
_MATRIX = (".weight", ".qweight", ".weight_packed")  # dense and packed names
_SCALE = ("scale", "scales", "scale_inv")


def followed(arch: ArchSpec, directory: Path) -> ArchSpec:
    """`arch` corrected by the files: their dtype, and an untied head where one is stored that differs from the embedding.
    Unchanged without files (dummy weights). Raises ModelError for broken files, and for quantized weights that the config does
    not declare."""
    if not any(directory.glob("*.safetensors")):
        return arch
    stored = stored_tensors(directory)
    _check_kind(arch, stored, directory)
    return msgspec.structs.replace(
        arch,
        weights_dtype=_dtype_of(stored) or arch.weights_dtype,
        tie_embeddings=arch.tie_embeddings and not _has_own_head(stored),
    )


def _dtype_of(stored: Mapping[str, Placed]) -> str:
    """The most common dtype among dense matrices; "" where none is dense."""
    sizes = Counter[str]()
    for name, tensor in stored.items():
        if tensor.dtype in _FLOATS and len(tensor.shape) > 1 and not name.endswith(_SCALE):
            sizes[tensor.dtype] += (tensor.end - tensor.begin) // DTYPES[tensor.dtype][0]
    return DTYPES[sizes.most_common(1)[0][0]][1] if sizes else ""


def _has_own_head(stored: Mapping[str, Placed]) -> bool:
    """Whether the files hold a head that is not a copy of the embedding."""
    head, embedding = _find(stored, _HEADS), _find(stored, _EMBEDDINGS)
    return head is not None and (embedding is None or not have_same_bytes(head, embedding))


def _find(stored: Mapping[str, Placed], names: tuple[str, ...]) -> Placed | None:
    wanted = (prefix + name + part for prefix in _PREFIXES for name in names for part in _MATRIX)
    return next((stored[name] for name in wanted if name in stored), None)


def _check_kind(arch: ArchSpec, stored: Mapping[str, Placed], directory: Path) -> None:
    """Raises ModelError for int8 or float8 matrices without a quantization_config, and for the reverse."""
    kinds = {"I8": "INT8", "F8_E4M3": "FP8"}
    scaled = {
        name: each for name, each in stored.items() if any(name + end in stored for end in ("_scale", "_scale_inv"))
    }
    found = {kinds[each.dtype]: name for name, each in scaled.items() if each.dtype in kinds}
    told = arch.weights_kind.partition("_")[0]
    if told in kinds.values() and told not in found:
        raise ModelError(
            f"{directory / 'config.json'}: quantization_config tells of {told} weights; the files hold none"
        )
    for kind, name in found.items():
        if kind != told:
            raise ModelError(
                f"{directory / 'config.json'}: its quantization_config does not tell of {kind} weights; {name} is one"
            )

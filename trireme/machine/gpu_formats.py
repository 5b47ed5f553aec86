"""Weight formats on a GPU: which format each stored matrix gets, and its bytes per weight. Pure and torch-free.

Used by resolve and `trireme plan` for sizes, and by models/cuda/weights/sources to choose a matrix's format;
models/cuda/layers/linear has the class that computes with each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trireme.config import Decision, ModelConfig
from trireme.errors import ConfigError
from trireme.machine.memory_budget import num_params
from trireme.model.gguf_header import GgufTensor
from trireme.model.packed_ints import BLOCK_SIZES
from trireme.model.spec import ArchSpec


class WeightFormat(NamedTuple):
    """Bytes per weight, and the unit that the number of inputs must be a multiple of."""

    weight: float
    unit: int = 1


FORMATS = {
    "half": WeightFormat(2.0),  # bfloat16 or float16
    "fp8": WeightFormat(1.0, 64),  # e4m3 with a float32 scale per output
    "int8": WeightFormat(1.0, 16),  # likewise
    # GGUF types by 256 values, all but q4_k and q5_k repacked (models/cuda/weights/gguf_blocks), where q6_k takes
    # 14 bytes more
    "q4_k": WeightFormat(144 / 256, 256),
    "q5_k": WeightFormat(176 / 256, 256),
    "q6_k": WeightFormat(224 / 256, 256),
    "q8_0": WeightFormat(272 / 256, 256),
    "q4_0": WeightFormat(144 / 256, 256),
    "q4_1": WeightFormat(160 / 256, 256),
    "q5_0": WeightFormat(176 / 256, 256),
    "q5_1": WeightFormat(192 / 256, 256),
    "iq4_nl": WeightFormat(144 / 256, 256),
    # 4-bit codes with a scale and a zero per group of inputs of an output
    "w4_32": WeightFormat(1 / 2 + 4 / 32, 128),
    "w4_64": WeightFormat(1 / 2 + 4 / 64, 128),
    "w4_128": WeightFormat(1 / 2 + 4 / 128, 128),
    "fp8_blocks": WeightFormat(1 + 4 / 128, 128),  # e4m3 with a float32 scale per 128 inputs of an output
}
LEAST_CAPABILITY = {"fp8": (8, 9)}  # compute capability that the GEMMs of a format need
SCHEMES = ("fp8", "int8", "q4_k")  # of --quantize, named by their format
FOR_GPUS_ALONE = ("fp8", "q4_k")  # of these, GPU-only ones
_BLOCKS = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
OF_BLOCKS = {kind: kind.lower() for kind in _BLOCKS}  # GGUF types computed with directly, every value exact
# Likewise, for kinds of models.weights.sources.RawMatrix.
OF_CHECKPOINTS = {
    **{"FP8": "fp8", "FP8_BLOCKS": "fp8_blocks", "INT8": "int8"},
    **{f"W4_{size}": f"w4_{size}" for size in BLOCK_SIZES},
}
_DENSE = ("F32", "F16", "BF16")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


class Stored(NamedTuple):
    """Matrices of a GGUF file by type, without the embedding: their number and their weights. `head` is the type of the output
    matrix, included in the number of matrices but not in the weights; "" where the embedding is tied."""

    tensors: Mapping[str, int]
    weights: Mapping[str, int]
    head: str


def stored_in(tensors: Mapping[str, GgufTensor]) -> Stored:
    """Reads `Stored` from the header of a GGUF file."""
    count, weights = Counter[str](), Counter[str]()
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and name != _EMBEDDING:
            count[tensor.kind] += 1
            weights[tensor.kind] += 0 if name == _HEAD else tensor.shape[0] * tensor.shape[1]
    return Stored(count, weights, tensors[_HEAD].kind if _HEAD in tensors else "")


def format_of(kind: str, k: int, scheme: str | None) -> str:
    """The format of a stored matrix with k inputs: its own where a kernel computes with it, else that of `scheme` where its
    blocks fit, else 16 bits."""
    as_it_lies = OF_BLOCKS.get(kind) or OF_CHECKPOINTS.get(kind)
    if as_it_lies is not None and k % FORMATS[as_it_lies].unit == 0:
        return as_it_lies
    return scheme if scheme is not None and k % FORMATS[scheme].unit == 0 else "half"


def weights_by_format(model: ModelConfig, arch: ArchSpec, stored: Stored | None) -> dict[str, int]:
    """Number of weights of a model in each format. The embedding, and an untied head, stay 16-bit unless a file stores them in
    quant blocks."""
    ends = arch.vocab_size * arch.hidden * (1 if arch.tie_embeddings else 2)
    inside = num_params(arch) - ends
    if stored is None:
        found = Counter({"half": ends})
        found[format_of(arch.weights_kind, arch.hidden, model.quantize)] += inside
        return dict(found)
    found = Counter({"half": arch.vocab_size * arch.hidden})
    if stored.head:
        found[format_of(stored.head, arch.hidden, None)] += arch.vocab_size * arch.hidden
    for kind, count in stored.weights.items():
        found[format_of(kind, arch.hidden, model.quantize)] += count
    return dict(found)


def gpu_weight_bytes(model: ModelConfig, arch: ArchSpec, stored: Stored | None = None) -> int:
    """Bytes of one copy of the weights on a GPU; norms, biases and per-output scales are negligible and not counted."""
    found = weights_by_format(model, arch, stored)
    return round(sum(FORMATS[name].weight * count for name, count in found.items()))


def check_gpu(formats: Iterable[str], capability: tuple[int, int], name: str) -> None:
    """Raises ConfigError for a format whose GEMMs the GPU `name` does not support."""
    for form in formats:
        if capability < LEAST_CAPABILITY.get(form, (0, 0)):
            least, have = (".".join(map(str, pair)) for pair in (LEAST_CAPABILITY[form], capability))
            raise ConfigError(
                f"GEMMs of {form} weights need a GPU of compute capability {least}; {name} has {have}",
                hint="--quantize int8 or q4_k, or weights of 16 bits",
            )


def expansion_of(model: ModelConfig, arch: ArchSpec, stored: Stored | None) -> Decision | None:
    """The Decision that reports quant blocks which no GPU kernel computes with directly."""
    if stored is None:
        return None
    others = {
        kind: count
        for kind, count in stored.tensors.items()
        if kind not in _DENSE and format_of(kind, arch.hidden, None) == "half"
    }
    if not others:
        return None
    becomes = model.quantize or "16 bits"
    shown = ", ".join(f"{count} {kind}" for kind, count in sorted(others.items()))
    return Decision("weights", f"{shown} as {becomes}", "no kernel of the GPU computes with these types")

"""Table of model families: which body computes a family, and how its files differ. Used by models.load only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from models import layouts
from models.arch import decoder, gpt, moe
from models.forward import Group, Model
from models.weights import WeightSource
from trireme.arch import ArchSpec
from trireme.errors import ModelError
from trireme.mesh import Mesh


class Body(Protocol):
    """Class of a body: builds one stage on one rank from the weights it finds under their Hugging Face names."""

    def __call__(
        self,
        arch: ArchSpec,
        mesh: Mesh,
        group: Group,
        source: WeightSource,
        *,
        dense: str | None = None,
        progress: Callable[[str, int, int], None],
        max_len: int | None = None,
    ) -> Model: ...


def _as_stored(source: WeightSource, arch: ArchSpec) -> WeightSource:
    return source


class Family(NamedTuple):
    """`gguf_pairs`: GGUF converters store q and k rows of this family in interleaved rotary order. `seen`: a checkpoint of
    it under the names its body uses."""

    gguf_pairs: bool = False
    gguf_names: Mapping[str, str] = {}  # parts of GGUF names that mean another weight than usual
    gguf_seen: Callable[[WeightSource, ArchSpec], WeightSource] = _as_stored
    body: Body = decoder.Decoder
    weight_names: Callable[[ArchSpec], Iterable[str]] = decoder.weight_names  # every weight of the whole model
    ignorable_names: Callable[[ArchSpec], Iterable[str]] = decoder.ignorable_names  # may be there without being used
    seen: Callable[[WeightSource, ArchSpec], WeightSource] = _as_stored


_GPT = Family(
    body=gpt.GptModel, weight_names=gpt.weight_names, ignorable_names=gpt.ignorable_names, seen=gpt.seen_names
)
_MOE = Family(
    body=moe.MoeModel, weight_names=moe.weight_names, ignorable_names=moe.ignorable_names, seen=moe.seen_names
)

_BEFORE_FFN = {"ffn_norm": "pre_feedforward_layernorm"}

FAMILIES: dict[str, Family] = {
    "llama": Family(gguf_pairs=True),
    "mistral": Family(gguf_pairs=True),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(),
    "gemma2": Family(gguf_names=_BEFORE_FFN),
    "gemma3_text": Family(gguf_names=_BEFORE_FFN),
    "phi3": Family(seen=layouts.phi3, gguf_names={"ffn_up": "mlp.gate_up_proj"}, gguf_seen=layouts.phi3),
    "olmo2": Family(),
    "granite": Family(gguf_pairs=True),
    "smollm3": Family(gguf_pairs=True),
    "cohere": Family(gguf_pairs=True, seen=layouts.cohere),
    "stablelm": Family(seen=layouts.stablelm),
    "internlm2": Family(gguf_pairs=True, seen=layouts.internlm2),
    "baichuan": Family(gguf_pairs=True, seen=layouts.baichuan),
    "gpt2": _GPT,
    "gpt_neox": _GPT,
    "falcon": _GPT,
    "llama4": _MOE,
    "gpt_oss": _MOE,
}


def family_named(name: str) -> Family:
    """The row of a family. Raises ModelError that lists the supported ones."""
    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]

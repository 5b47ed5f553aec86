"""Table of model families: the body that computes each and how its checkpoints differ. Used by models.load only.

Bodies are named by module and imported on use, so that torch is loaded only where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import NamedTuple, Protocol

from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.forward import Group, TensorModel
from trireme.models.weights import layouts
from trireme.models.weights.sources import WeightSource
from trireme.topology.mesh import Mesh


class Body(Protocol):
    """Constructor of a body: builds one stage on one rank from weights under their Hugging Face names."""

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
    ) -> TensorModel: ...


Seen = Callable[[WeightSource, ArchSpec], WeightSource]


def _as_stored(source: WeightSource, arch: ArchSpec) -> WeightSource:
    return source


class Family(NamedTuple):
    """`gguf_pairs`: GGUF converters store q and k outputs of this family in interleaved rotary order. `seen` renames a
    checkpoint to the names its body uses; `as_decoder` renames those to the Llama-like ones that the GPU body uses."""

    gguf_pairs: bool = False
    gguf_names: Mapping[str, str] = {}  # GGUF name parts that denote a different weight in this family
    gguf_seen: Seen = _as_stored
    seen: Seen = _as_stored
    body: tuple[str, str] = ("trireme.models.cpu.decoder", "TorchDecoder")  # module and class of the torch body
    as_decoder: Seen = _as_stored
    names: str = "trireme.models.cpu.stage_weights"  # module of weight_names and ignorable_names

    def load_body(self) -> Body:
        module, name = self.body
        found: Body = getattr(import_module(module), name)
        return found

    def weight_names(self, arch: ArchSpec) -> Iterable[str]:
        """Every weight of the whole model."""
        found: Iterable[str] = import_module(self.names).weight_names(arch)
        return found

    def ignorable_names(self, arch: ArchSpec) -> Iterable[str]:
        """Weights that a file may contain unused."""
        found: Iterable[str] = import_module(self.names).ignorable_names(arch)
        return found


def _seen_by(module: str) -> Seen:
    """seen_names of a module, imported on first call."""
    return lambda source, arch: import_module(module).seen_names(source, arch)


def _family_of(module: str, name: str) -> Family:
    return Family(body=(module, name), names=module, seen=_seen_by(module))


def _as_decoder(source: WeightSource, arch: ArchSpec) -> WeightSource:
    found: WeightSource = import_module("trireme.models.arch.gpt_names").DecoderNames(source, arch)
    return found


_GPT = _family_of("trireme.models.cpu.gpt", "GptModel")._replace(as_decoder=_as_decoder)
_MOE = _family_of("trireme.models.cpu.moe", "MoeModel")

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
    "mixtral": _MOE,
    "qwen3_moe": _MOE,
}


def family_named(name: str) -> Family:
    """The table entry of a family. Raises ModelError listing the supported ones."""
    if name not in FAMILIES:
        raise ModelError(f"model family {name!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[name]

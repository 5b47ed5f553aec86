"""Layer structure of each family for the GPU body: one description for Llama-like decoders and those of models/cpu/gpt.

Pure; read by models/cuda/decoder when a model is built.
"""

from __future__ import annotations

from typing import NamedTuple

from trireme.model.bodies import GptBody
from trireme.model.reader import ArchSpec
from trireme.models.arch.names import NORM_NAMES, NormNames


class LayerConfig(NamedTuple):
    """`is_parallel`: both branches read the same residual. `learned_positions`: size of the position embedding; 0: rotary."""

    norms: NormNames
    is_parallel: bool
    is_rms: bool
    has_norm_bias: bool
    has_gate: bool
    activation: str
    attention_scale: float
    scale_by_layer: bool = False  # also divide the scores of layer i by i + 1
    learned_positions: int = 0

    def scale_of(self, index: int) -> float:
        """Softmax scale of layer `index`."""
        return self.attention_scale / (index + 1) if self.scale_by_layer else self.attention_scale


def layer_config_of(arch: ArchSpec) -> LayerConfig:
    """The layer structure of a model."""
    body = arch.body
    if not isinstance(body, GptBody):
        return LayerConfig(
            norms=NORM_NAMES[arch.norm_placement],
            is_parallel=arch.norm_placement == "parallel",
            is_rms=arch.norm_kind == "rms",
            has_norm_bias=arch.norm_bias,
            has_gate=True,
            activation=arch.activation,
            attention_scale=attention_scale_of(arch),
        )
    two = NORM_NAMES["pre"]
    return LayerConfig(
        norms=two._replace(ffn_norm="") if body.norms == "shared" else two,
        is_parallel=body.parallel,
        is_rms=False,
        has_norm_bias=True,
        has_gate=False,
        activation=body.activation,
        attention_scale=body.attention_scale or attention_scale_of(arch),
        scale_by_layer=body.scale_by_layer,
        learned_positions=body.learned_positions,
    )


def attention_scale_of(arch: ArchSpec) -> float:
    """Softmax scale of attention: the model's own, else head_dim ** -0.5."""
    return arch.attn_scale or arch.head_dim**-0.5

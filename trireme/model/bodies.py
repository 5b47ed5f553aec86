"""What the GPT-like and the mixture-of-experts bodies need to know beyond ArchSpec: a field `body` of it, per model.

Pure data, torch-free. Filled by trireme/model/hf_families.py, read by models/arch/{gpt,moe}.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["gelu", "gelu_tanh", "relu"]


class GptBody(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """GPT-2, GPT-NeoX, Falcon: layer norms with biases, and a feed-forward network without a gate."""

    activation: Activation = "gelu"
    parallel: bool = False  # attention and feed-forward read the same residual
    norms: Literal["two", "shared", "separate"] = (
        "two"  # shared: one norm feeds both; separate: Falcon's ln_attn, ln_mlp
    )
    learned_positions: int = 0  # rows of a position embedding; 0: rotary
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    scale_by_layer: bool = False  # scores of layer i are divided by i + 1 as well


class MoeBody(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Llama 4, GPT-OSS, Mixtral and Qwen3-MoE: RMS norms, gated experts of which a router picks `top_k` per token. ArchSpec.ffn
    is their width."""

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]  # the other layers have one network of width dense_ffn
    router: Literal["sigmoid", "softmax"]  # sigmoid scales an expert's input; softmax (over the chosen) its output
    dense_ffn: int = 0
    shared_expert: bool = False
    expert_names: tuple[str, ...] = ()  # gate, up, down: matrices of each expert; else two tensors have all experts
    biases: bool = False  # of router and experts
    glu_limit: float = 0.0  # 0: SwiGLU; else GPT-OSS's clamped one
    glu_alpha: float = 1.702
    mxfp4: bool = False  # experts are stored as 4-bit blocks
    sinks: bool = False
    no_rope_layers: tuple[int, ...] = ()
    attention_chunk: int = 0  # rotary layers see the tokens of their own chunk only; 0: all
    unit_qk_norm: bool = False  # q and k of rotary layers are normed, without weights
    temperature: tuple[float, int] | None = (
        None  # (strength, tokens per step) of the scale on q in layers without rotation
    )
    wrapped: bool = False  # the text part of a checkpoint that also sees images

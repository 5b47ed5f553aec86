"""Shape parameters of the GPT-like and mixture-of-experts models beyond ArchSpec: its field `body`, per model.

Pure data, torch-free. Filled by trireme/model/hf_families.py, read by models/arch/{gpt,moe}.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Activation = Literal["gelu", "gelu_tanh", "relu"]


class GptBody(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """GPT-2, GPT-NeoX, Falcon: layer norms with biases, and an FFN without a gate."""

    activation: Activation = "gelu"
    parallel: bool = False  # attention and FFN read the same residual
    norms: Literal["two", "shared", "separate"] = (
        "two"  # shared: one norm feeds both branches; separate: Falcon's ln_attn, ln_mlp
    )
    learned_positions: int = 0  # entries of a position embedding; 0: rotary
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    scale_by_layer: bool = False  # scores of layer i are divided by i + 1 as well


class MoeBody(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Llama 4, GPT-OSS, Mixtral and Qwen3-MoE: RMS norms, gated experts of which a router picks `top_k` per token. ArchSpec.ffn
    is the expert width."""

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]  # the other layers have a dense FFN of width dense_ffn
    router: Literal[
        "sigmoid", "softmax"
    ]  # sigmoid scales an expert's input; softmax (over the chosen experts) its output
    dense_ffn: int = 0
    shared_expert: bool = False
    expert_names: tuple[str, ...] = ()  # gate, up, down: matrices of each expert; empty: two tensors hold all experts
    biases: bool = False  # of router and experts
    glu_limit: float = 0.0  # 0: SwiGLU; else the clamp of GPT-OSS's variant
    glu_alpha: float = 1.702
    mxfp4: bool = False  # experts are stored as 4-bit quant blocks
    sinks: bool = False
    no_rope_layers: tuple[int, ...] = ()
    attention_chunk: int = 0  # rotary layers attend within their own chunk only; 0: to all tokens
    unit_qk_norm: bool = False  # q and k of rotary layers are normalized, without weights
    temperature: tuple[float, int] | None = None  # (strength, tokens per step) of the scale on q in layers without RoPE
    wrapped: bool = False  # the text model of a multimodal checkpoint

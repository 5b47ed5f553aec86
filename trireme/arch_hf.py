"""Reads config.json of a Hugging Face checkpoint of the decoder families. Called by trireme.arch and by other readers of
config.json for its parts. Code that comes with a model (auto_map) is never looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from trireme.arch_spec import ArchSpec, Dim, Positive, RopeKind, RopeSpec, checked, token_list, yarn_scale
from trireme.errors import ModelError

# Types by the name in the file. Everything else that differs is a field of ArchSpec.
HF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class HfRope(msgspec.Struct, frozen=True):
    rope_type: str | None = None
    type: str | None = None  # the older name of rope_type
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Dim | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = None


class HfConfig(msgspec.Struct, frozen=True):
    model_type: str
    hidden_size: Dim
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_attention_heads: Dim
    intermediate_size: Dim
    vocab_size: Dim
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    max_position_embeddings: Dim = 2048
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Positive | None = None
    rope_scaling: HfRope | None = None
    rope_parameters: HfRope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Dim | None = None
    sliding_window: int | None | msgspec.UnsetType = msgspec.UNSET  # absent means 4096, null means none
    use_sliding_window: bool = False
    max_window_layers: int | None = None
    layer_types: list[str] | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    quantization_config: dict[str, object] | None = None


def arch_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """ArchSpec of a Hugging Face checkpoint from its parsed config.json and generation_config.json ({} if absent)."""
    family = config["model_type"]
    try:
        have = msgspec.convert(config, HfConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error
    if have.hidden_act != "silu":
        raise ModelError(f"{where} has hidden_act {have.hidden_act!r}; silu is supported")
    if have.quantization_config is not None:
        scheme = have.quantization_config.get("quant_method", "unknown")
        raise ModelError(
            f"{where} has quantized weights ({scheme}); dense safetensors and GGUF are supported",
            hint="use a GGUF file of this model, or its unquantized checkpoint",
        )
    head_dim = have.head_dim or have.hidden_size // have.num_attention_heads
    window, full_layers = _windows(have, where)
    rope = rope_from_config(have, head_dim, where)
    extended = int(rope.original_max_position * rope.factor) if rope.kind == "yarn" else 0
    arch = ArchSpec(
        family=have.model_type,
        num_layers=have.num_hidden_layers,
        hidden=have.hidden_size,
        num_heads=have.num_attention_heads,
        num_kv_heads=have.num_key_value_heads or have.num_attention_heads,
        head_dim=head_dim,
        ffn=have.intermediate_size,
        vocab_size=have.vocab_size,
        norm_eps=have.rms_norm_eps,
        rope=rope,
        max_position=max(have.max_position_embeddings, extended),
        tie_embeddings=bool(have.tie_word_embeddings),
        qkv_bias=have.attention_bias or family == "qwen2",
        o_bias=have.attention_bias and family in ("llama", "qwen3"),
        mlp_bias=have.mlp_bias and family == "llama",
        qk_norm=family == "qwen3",
        sliding_window=window,
        full_attention_layers=full_layers,
        bos_token_id=next(iter(token_list(have.bos_token_id)), None),
        eos_token_ids=tuple(
            dict.fromkeys([*token_list(generation.get("eos_token_id")), *token_list(have.eos_token_id)])
        ),
        pad_token_id=have.pad_token_id,
        weights_dtype=have.dtype or have.torch_dtype or "float32",
    )
    return checked(arch, where)


def rope_from_config(have: HfConfig, head_dim: int, where: Path) -> RopeSpec:
    """rope_parameters (transformers 5) or rope_theta with rope_scaling (before)."""
    rope = have.rope_parameters or have.rope_scaling or HfRope()
    kind = rope_kind(rope.rope_type or rope.type or "default", where)
    partial = rope.partial_rotary_factor or have.partial_rotary_factor or 1.0
    trained = have.original_max_position_embeddings or rope.original_max_position_embeddings
    trained = trained or have.max_position_embeddings
    factor = rope.factor
    if factor is None:
        if kind in ("linear", "llama3"):
            raise ModelError(f"{where}: rope scaling of type {kind} lacks factor")
        factor = have.max_position_embeddings / trained if kind == "yarn" else 1.0
    attention = rope.attention_factor
    if kind == "yarn" and attention is None and rope.mscale and rope.mscale_all_dim:
        attention = yarn_scale(factor, rope.mscale) / yarn_scale(factor, rope.mscale_all_dim)
    return RopeSpec(
        kind=kind,
        theta=rope.rope_theta or have.rope_theta or 10000.0,
        dim=int(head_dim * partial),
        factor=factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position=trained,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=attention,
        truncate=rope.truncate,
    )


def rope_kind(name: str, where: Path) -> RopeKind:
    kinds: dict[str, RopeKind] = {"none": "default", **{kind: kind for kind in get_args(RopeKind)}}
    if name not in kinds:
        raise ModelError(f"{where} has rope scaling of type {name!r}; supported are {', '.join(kinds)}")
    return kinds[name]


def _windows(have: HfConfig, where: Path) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window, and the layers that ignore it. Qwen has a switch and applies it from max_window_layers on."""
    window = 4096 if have.sliding_window is msgspec.UNSET else have.sliding_window
    if window is not None and window < 1:
        raise ModelError(f"{where}: sliding_window is {window}")
    if have.model_type == "llama":
        return None, ()
    if have.model_type in ("qwen2", "qwen3"):
        if not have.use_sliding_window or window is None:
            return None, ()
        first = 28 if have.max_window_layers is None else have.max_window_layers
        full = tuple(range(min(max(first, 0), have.num_hidden_layers)))
    else:
        full = ()
    if window is not None and have.layer_types is not None:
        if len(have.layer_types) != have.num_hidden_layers:
            raise ModelError(f"{where}: {len(have.layer_types)} layer_types for {have.num_hidden_layers} layers")
        full = tuple(i for i, kind in enumerate(have.layer_types) if kind == "full_attention")
    return (window, full) if len(full) < have.num_hidden_layers else (None, ())

"""Reads config.json of Hugging Face checkpoints of the decoder families. Called by trireme.model.reader; other readers of
config.json use parts of it. Code that ships with a model (auto_map) is never executed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from trireme.errors import ModelError
from trireme.model.packed_ints import packing_of
from trireme.model.quantized import check_quantized
from trireme.model.spec import ArchSpec, Dim, Positive, RopeKind, RopeSpec, checked, token_list, yarn_scale

_Finite = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Part = Annotated[float, Meta(gt=0, le=1)]
_Width = Annotated[float, Meta(gt=0, le=1e6)]


# RoPE scaling keys that have no effect here.
_ROPE_NOTES = ("finetuned", "max_position_embeddings")
_SAME_ROPE = {"su": "longrope"}
_NEWER = "rope_parameters"


class HfRope(msgspec.Struct, frozen=True):
    rope_type: str | None = None
    type: str | None = None  # legacy name of rope_type
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
    partial_rotary_factor: _Part | None = None
    short_factor: list[float] = []
    long_factor: list[float] = []


class HfConfig(msgspec.Struct, frozen=True):
    model_type: str
    hidden_size: Dim
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_attention_heads: Dim
    intermediate_size: Dim
    vocab_size: Dim
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] | None = None
    layer_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-5
    max_position_embeddings: Dim = 2048
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: Positive | None = None
    rope_scaling: dict[str, Any] | None = None  # an HfRope
    rope_parameters: dict[str, Any] | None = None  # an HfRope, or one per layer type
    partial_rotary_factor: _Part | None = None
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
    bias: bool = True  # InternLM2
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_qk_norm: bool = False
    use_parallel_residual: bool = False
    query_pre_attn_scalar: _Width | None = None
    attn_logit_softcapping: _Finite | None = None
    final_logit_softcapping: _Finite | None = None
    embedding_multiplier: _Finite = 1.0
    residual_multiplier: _Finite = 1.0
    attention_multiplier: _Finite | None = None
    logits_scaling: Positive = 1.0
    logit_scale: _Finite | None = None
    rope_local_base_freq: Positive | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=1)] | None = None
    use_bidirectional_attention: bool | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Annotated[int, Meta(ge=1)] | None = None


def arch_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """ArchSpec of a Hugging Face checkpoint from its parsed config.json and generation_config.json ({} if absent)."""
    family = config["model_type"]
    try:
        have = msgspec.convert(config, HfConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error
    quantized = have.quantization_config
    packing = None if quantized is None else packing_of(quantized, where)
    head_dim = have.head_dim or have.hidden_size // have.num_attention_heads
    window, full_layers = _windows(have, where)
    rope = rope_from_config(have, head_dim, where)
    extended = int(rope.original_max_position * rope.factor) if rope.kind in ("yarn", "dynamic") else 0
    arch = ArchSpec(
        family=have.model_type,
        num_layers=have.num_hidden_layers,
        hidden=have.hidden_size,
        num_heads=have.num_attention_heads,
        num_kv_heads=have.num_key_value_heads or have.num_attention_heads,
        head_dim=head_dim,
        ffn=have.intermediate_size,
        vocab_size=have.vocab_size,
        norm_eps=1e-6 if have.rms_norm_eps is None else have.rms_norm_eps,
        activation=_activation(have, where),
        rope=rope,
        max_position=max(have.max_position_embeddings, extended),
        tie_embeddings=bool(have.tie_word_embeddings),
        qkv_bias=have.attention_bias or family == "qwen2",
        o_bias=have.attention_bias and family in _O_BIASED,
        mlp_bias=have.mlp_bias and family == "llama",
        sliding_window=window,
        full_attention_layers=full_layers,
        bos_token_id=next(iter(token_list(have.bos_token_id)), None),
        eos_token_ids=tuple(
            dict.fromkeys([*token_list(generation.get("eos_token_id")), *token_list(have.eos_token_id)])
        ),
        pad_token_id=have.pad_token_id,
        weights_dtype=have.dtype or have.torch_dtype or "float32",
        weights_kind="" if quantized is None else packing.kind if packing else check_quantized(quantized, where),
        packing=packing,
    )
    return checked(msgspec.structs.replace(arch, **HF_FAMILIES[family](have, where)), where)


def rope_from_config(have: HfConfig, head_dim: int, where: Path) -> RopeSpec:
    """rope_parameters (transformers 5) or rope_theta with rope_scaling (before)."""
    given, older = have.rope_parameters or {}, have.rope_scaling or {}
    if "full_attention" in given:  # one per layer type
        return _rope_from(have, _rope_converted(given["full_attention"], _NEWER, where), head_dim, where)
    _check_both(given, {**older, "rope_theta": have.rope_theta}, where)
    return _rope_from(
        have, _rope_converted(given or older, _NEWER if given else "rope_scaling", where), head_dim, where
    )


def _check_both(newer: Mapping[str, Any], older: Mapping[str, Any], where: Path) -> None:
    """Values that a config gives twice, in the transformers 5 form and in the older one, must agree."""
    for key, value in newer.items():
        told = older.get(key)
        if told is not None and value is not None and told != value:
            raise ModelError(f"{where}: rope_parameters has {key} {value!r}, elsewhere it is {told!r}")


def local_rope_from_config(have: HfConfig, head_dim: int, where: Path) -> RopeSpec | None:
    """RoPE of the sliding-window layers, where the config gives them their own."""
    given = (have.rope_parameters or {}).get("sliding_attention")
    if given is not None:
        return _rope_from(have, _rope_converted(given, _NEWER, where), head_dim, where)
    if have.rope_local_base_freq is not None:
        return RopeSpec(theta=have.rope_local_base_freq, dim=head_dim)
    return None


def _rope_converted(given: Any, field: str, where: Path) -> HfRope:
    if isinstance(given, dict):
        known = {*HfRope.__struct_fields__, *_ROPE_NOTES}
        unknown = sorted(str(key) for key, value in given.items() if key not in known and value is not None)
        if unknown:
            raise ModelError(f"{where}: {field} has {', '.join(unknown)}, which is not supported")
        kinds = {given[key] for key in ("rope_type", "type") if isinstance(given.get(key), str)}
        if len(kinds) > 1 and {_SAME_ROPE.get(kind, kind) for kind in kinds} != {"longrope"}:
            raise ModelError(f"{where}: {field} is of the types {' and '.join(sorted(kinds))} at once")
    try:
        return msgspec.convert(given, HfRope)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {str(error).replace('$', '$.' + field)}") from error


def _rope_from(have: HfConfig, rope: HfRope, head_dim: int, where: Path) -> RopeSpec:
    kind = rope_kind(rope.rope_type or rope.type or "default", where)
    partial = rope.partial_rotary_factor or have.partial_rotary_factor or 1.0
    outside, inside = have.original_max_position_embeddings, rope.original_max_position_embeddings
    if outside and inside and outside != inside:
        raise ModelError(f"{where}: original_max_position_embeddings is {outside}, and {inside} in its rope scaling")
    trained = outside or inside
    trained = trained or have.max_position_embeddings
    dim = int(head_dim * partial)
    factor = rope.factor
    if factor is None:
        if kind in ("linear", "llama3", "dynamic"):
            raise ModelError(f"{where}: rope scaling of type {kind} lacks factor")
        factor = have.max_position_embeddings / trained if kind in ("yarn", "longrope") else 1.0
    attention = rope.attention_factor
    if kind == "yarn" and attention is None and rope.mscale and rope.mscale_all_dim:
        attention = yarn_scale(factor, rope.mscale) / yarn_scale(factor, rope.mscale_all_dim)
    if kind == "longrope" and not len(rope.short_factor) == len(rope.long_factor) == dim // 2:
        raise ModelError(f"{where}: longrope needs {dim // 2} short and long factors")
    return RopeSpec(
        kind=kind,
        theta=rope.rope_theta or have.rope_theta or 10000.0,
        dim=dim,
        factor=factor,
        low_freq_factor=rope.low_freq_factor,
        high_freq_factor=rope.high_freq_factor,
        original_max_position=trained,
        beta_fast=rope.beta_fast or 32.0,
        beta_slow=rope.beta_slow or 1.0,
        attention_factor=attention,
        short_factors=tuple(rope.short_factor),
        long_factors=tuple(rope.long_factor),
        truncate=rope.truncate,
    )


def rope_kind(name: str, where: Path) -> RopeKind:
    kinds: dict[str, RopeKind] = {"none": "default", "su": "longrope", **{kind: kind for kind in get_args(RopeKind)}}
    if name not in kinds:
        raise ModelError(f"{where} has rope scaling of type {name!r}; supported are {', '.join(kinds)}")
    return kinds[name]


def _windows(have: HfConfig, where: Path) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window, and the layers without it. Qwen has a switch and applies the window from max_window_layers on."""
    window = 4096 if have.sliding_window is msgspec.UNSET else have.sliding_window
    if window is not None and window < 1:
        raise ModelError(f"{where}: sliding_window is {window}")
    if have.model_type not in _WINDOWED or (have.model_type not in ("mistral", "phi3") and window is None):
        return None, ()
    if have.sliding_window is msgspec.UNSET and have.model_type == "phi3":
        return None, ()
    if have.model_type in ("qwen2", "qwen3"):
        if not have.use_sliding_window or window is None:
            return None, ()
        first = 28 if have.max_window_layers is None else have.max_window_layers
        full = tuple(range(min(max(first, 0), have.num_hidden_layers)))
    elif have.model_type in _PATTERNS:
        pattern = have.sliding_window_pattern or _PATTERNS[have.model_type]
        full = tuple(range(pattern - 1, have.num_hidden_layers, pattern))
    else:
        full = ()
    if window is not None and have.layer_types is not None:
        if len(have.layer_types) != have.num_hidden_layers:
            raise ModelError(f"{where}: {len(have.layer_types)} layer_types for {have.num_hidden_layers} layers")
        if unknown := sorted({*have.layer_types} - {"full_attention", "sliding_attention"}):
            raise ModelError(f"{where}: layer_types {unknown}; supported: full_attention and sliding_attention")
        full = tuple(i for i, kind in enumerate(have.layer_types) if kind == "full_attention")
    return (window, full) if len(full) < have.num_hidden_layers else (None, ())


def _activation(have: HfConfig, where: Path) -> Literal["silu", "gelu_tanh"]:
    if have.model_type.startswith("gemma"):
        act = have.hidden_activation or "gelu_pytorch_tanh"  # (the first Gemma's hidden_act says gelu but means this)
    else:
        act = have.hidden_act or "silu"
    if act == "silu":
        return "silu"
    if act == "gelu_pytorch_tanh":
        return "gelu_tanh"
    raise ModelError(f"{where} has hidden_act {act!r}; silu and gelu_pytorch_tanh are supported")


# ---------------------------------------------------------------- differences between families

_O_BIASED = ("llama", "qwen3", "cohere", "granite", "smollm3")
_WINDOWED = ("mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "cohere2")
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}  # one layer in so many has full attention


def _plain(have: HfConfig, where: Path) -> dict[str, Any]:
    return {}


def _qwen3(have: HfConfig, where: Path) -> dict[str, Any]:
    return {"qk_norm": True}


def _gemma(have: HfConfig, where: Path) -> dict[str, Any]:
    tied = have.tie_word_embeddings is not False
    return {"norm_offset": 1.0, "embed_scale": have.hidden_size**0.5, "tie_embeddings": tied}


def _gemma2(have: HfConfig, where: Path) -> dict[str, Any]:
    return {
        **_gemma(have, where),
        "norm_placement": "both",
        "attn_scale": (have.query_pre_attn_scalar or 256.0) ** -0.5,
        "attn_softcap": have.attn_logit_softcapping or 0.0,
        "logit_softcap": have.final_logit_softcapping or 0.0,
    }


def _gemma3(have: HfConfig, where: Path) -> dict[str, Any]:
    if have.use_bidirectional_attention:
        raise ModelError(f"{where} asks for attention in both directions, which is not supported")
    head_dim = have.head_dim or have.hidden_size // have.num_attention_heads
    local = local_rope_from_config(have, head_dim, where) or RopeSpec(theta=10000.0, dim=head_dim)
    return {**_gemma2(have, where), "qk_norm": True, "rope_local": local}


def _phi3(have: HfConfig, where: Path) -> dict[str, Any]:
    return {"norm_eps": 1e-5 if have.rms_norm_eps is None else have.rms_norm_eps}


def _olmo2(have: HfConfig, where: Path) -> dict[str, Any]:
    return {
        "norm_placement": "post",
        "qk_norm": True,
        "qk_norm_kind": "wide",
        "norm_eps": 1e-5 if have.rms_norm_eps is None else have.rms_norm_eps,
        "o_bias": have.attention_bias,
    }


def _granite(have: HfConfig, where: Path) -> dict[str, Any]:
    return {
        "embed_scale": have.embedding_multiplier,
        "residual_scale": have.residual_multiplier,
        "attn_scale": 1.0 if have.attention_multiplier is None else have.attention_multiplier,
        "logit_scale": 1.0 / have.logits_scaling,
        "mlp_bias": have.mlp_bias,
    }


def _smollm3(have: HfConfig, where: Path) -> dict[str, Any]:
    every = have.no_rope_layer_interval or 4
    flags = have.no_rope_layers
    if flags is None:
        flags = [int((layer + 1) % every != 0) for layer in range(have.num_hidden_layers)]
    if len(flags) != have.num_hidden_layers:
        raise ModelError(f"{where}: {len(flags)} no_rope_layers for {have.num_hidden_layers} layers")
    if have.use_sliding_window:
        raise ModelError(f"{where} has use_sliding_window, which is not supported for smollm3")
    return {
        "no_rope_layers": tuple(layer for layer, rotates in enumerate(flags) if not rotates),
        "tie_embeddings": have.tie_word_embeddings is not False,
        "mlp_bias": have.mlp_bias,
    }


def _cohere(have: HfConfig, where: Path) -> dict[str, Any]:
    return {
        "norm_kind": "layer",
        "norm_eps": have.layer_norm_eps,
        "norm_placement": "parallel",
        "qk_norm": have.use_qk_norm,
        "qk_norm_kind": "heads",
        "logit_scale": 0.0625 if have.logit_scale is None else have.logit_scale,
        "tie_embeddings": have.tie_word_embeddings is not False,
        "rope": msgspec.structs.replace(
            rope_from_config(have, have.head_dim or have.hidden_size // have.num_attention_heads, where), pairs=True
        ),
    }


def _stablelm(have: HfConfig, where: Path) -> dict[str, Any]:
    head_dim = have.hidden_size // have.num_attention_heads
    partial = have.partial_rotary_factor
    rope = rope_from_config(have, head_dim, where)
    if partial is None and "partial_rotary_factor" not in (have.rope_parameters or {}):
        rope = msgspec.structs.replace(rope, dim=head_dim // 4)
    return {
        "norm_kind": "layer",
        "norm_bias": True,
        "norm_eps": have.layer_norm_eps,
        "norm_placement": "parallel" if have.use_parallel_residual else "pre",
        "qkv_bias": have.use_qkv_bias,
        "qk_norm": have.qk_layernorm,
        "qk_norm_kind": "heads",
        "rope": rope,
    }


def _internlm2(have: HfConfig, where: Path) -> dict[str, Any]:
    return {"qkv_bias": have.bias, "o_bias": have.bias}


def _baichuan(have: HfConfig, where: Path) -> dict[str, Any]:
    if have.hidden_size > 4096:
        raise ModelError(
            f"{where}: Baichuan of this size has ALiBi positions, which are not supported; the 7B ones are"
        )
    return {"unit_head": have.vocab_size == 125696}  # the second generation only


# Types by their name in the file: each one's settings beyond the shared fields.
HF_FAMILIES: dict[str, Callable[[HfConfig, Path], dict[str, Any]]] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "smollm3": _smollm3,
    "cohere": _cohere,
    "stablelm": _stablelm,
    "internlm2": _internlm2,
    "baichuan": _baichuan,
}

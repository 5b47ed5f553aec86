"""Reads config.json of the families that are not Llama-like decoders: GPT-2, GPT-NeoX, Falcon, Llama 4 (text), GPT-OSS, Mixtral,
Qwen3-MoE. Called by trireme.model.reader through its table of readers. Unsupported variants are rejected by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from trireme.errors import ModelError
from trireme.model.bodies import Activation, GptBody, MoeBody
from trireme.model.hf_config import HfConfig, rope_from_config
from trireme.model.spec import ArchSpec, Dim, Positive, RopeSpec, checked, token_list

_Layers = Annotated[int, Meta(ge=1, le=4096)]
_Eps = Annotated[float, Meta(ge=0, le=1)]
_S = TypeVar("_S", bound=msgspec.Struct)

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class _Basics(msgspec.Struct, frozen=True):
    """Fields common to every config.json."""

    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, object] | None = None


class _Gpt2(msgspec.Struct, frozen=True):
    vocab_size: Dim
    n_embd: Dim
    n_layer: _Layers
    n_head: Dim
    n_positions: Dim = 1024
    n_inner: Dim | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: _Eps = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False


class _GptNeoX(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    intermediate_size: Dim
    hidden_act: str = "gelu"
    max_position_embeddings: Dim = 2048
    layer_norm_eps: _Eps = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rotary_pct: Annotated[float, Meta(gt=0, le=1)] = 0.25
    rotary_emb_base: Positive = 10000.0


class _Falcon(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    num_kv_heads: Dim | None = None
    num_ln_in_parallel_attn: Literal[1, 2] | None = None
    layer_norm_epsilon: _Eps = 1e-5
    alibi: bool = False
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    bias: bool = False
    max_position_embeddings: Dim = 2048
    ffn_hidden_size: Dim | None = None
    activation: str = "gelu"


class _Llama4(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    intermediate_size: Dim
    intermediate_size_mlp: Dim = 16384
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Dim = 4096 * 32
    rms_norm_eps: _Eps = 1e-5
    num_experts_per_tok: Dim = 1
    num_local_experts: Dim = 16
    moe_layers: list[int] | None = None
    interleave_moe_layer_step: Dim = 1
    use_qk_norm: bool = True
    no_rope_layers: list[int] | None = None  # 1: with RoPE, 0: without
    no_rope_layer_interval: Dim = 4
    attention_chunk_size: Dim | None = 8192
    layer_types: list[str] | None = None
    attn_temperature_tuning: bool = True
    floor_scale: Dim = 8192
    attn_scale: Annotated[float, Meta(ge=-1e6, le=1e6)] = 0.1
    attention_bias: bool = False


class _GptOss(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    intermediate_size: Dim
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Dim = 131072
    rms_norm_eps: _Eps = 1e-5
    num_experts_per_tok: Dim = 4
    num_local_experts: Dim = 128
    sliding_window: Dim | None = 128
    layer_types: list[str] | None = None
    swiglu_alpha: Annotated[float, Meta(ge=-1e6, le=1e6)] = 1.702
    swiglu_limit: Annotated[float, Meta(gt=0, le=1e6)] = 7.0
    attention_bias: bool = True


class _Mixtral(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    intermediate_size: Dim
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Dim = 4096 * 32
    rms_norm_eps: _Eps = 1e-5
    num_experts_per_tok: Dim = 2
    num_local_experts: Dim = 8
    sliding_window: Dim | None = None


class _Qwen3Moe(msgspec.Struct, frozen=True):
    vocab_size: Dim
    hidden_size: Dim
    num_hidden_layers: _Layers
    num_attention_heads: Dim
    moe_intermediate_size: Dim
    intermediate_size: Dim = 6144
    num_key_value_heads: Dim | None = None
    head_dim: Dim | None = None
    hidden_act: str = "silu"
    max_position_embeddings: Dim = 32768
    rms_norm_eps: _Eps = 1e-6
    num_experts_per_tok: Dim = 8
    num_experts: Dim | None = None
    num_local_experts: Dim = 128
    norm_topk_prob: bool = False
    decoder_sparse_step: Dim = 1
    mlp_only_layers: list[int] | None = None
    attention_bias: bool = False
    use_sliding_window: bool = False


def _convert(config: dict[str, Any], kind: type[_S], where: Path) -> _S:
    try:
        return msgspec.convert(config, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error


def _shared(config: dict[str, Any], generation: dict[str, Any], where: Path, *, tied: bool) -> dict[str, Any]:
    """ArchSpec fields that all families spell alike; `tied` is the family's default."""
    have = _convert(config, _Basics, where)
    if have.quantization_config is not None and have.quantization_config.get("quant_method") != "mxfp4":
        raise ModelError(
            f"{where} has quantized weights ({have.quantization_config.get('quant_method', 'unknown')}), "
            "which this family does not support",
            hint="use its unquantized checkpoint",
        )
    eos = [*token_list(generation.get("eos_token_id")), *token_list(have.eos_token_id)]
    return {
        "tie_embeddings": tied if have.tie_word_embeddings is None else have.tie_word_embeddings,
        "bos_token_id": next(iter(token_list(have.bos_token_id)), None),
        "eos_token_ids": tuple(dict.fromkeys(eos)),
        "pad_token_id": have.pad_token_id,
        "weights_dtype": have.dtype or have.torch_dtype or "float32",
    }


def _rope(config: dict[str, Any], head_dim: int, where: Path, **defaults: Any) -> RopeSpec:
    """RopeSpec from a config's rope keys, over a family's defaults."""
    shape = dict.fromkeys(
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"), 1
    )
    names = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    given = {name: config[name] for name in (*names, "partial_rotary_factor") if config.get(name) is not None}
    newer = given.get("rope_parameters")
    if isinstance(newer, dict):  # overrides all of a family's defaults
        defaults = {name: value for name, value in defaults.items() if name not in (*newer, "rope_scaling")}
    return rope_from_config(
        _convert({"model_type": "", **shape, **defaults, **given}, HfConfig, where), head_dim, where
    )


def _activation(name: str, where: Path) -> Activation:
    if name not in _ACTIVATIONS:
        raise ModelError(f"{where} has the activation {name!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _head_dim(hidden: int, heads: int, where: Path) -> int:
    if hidden % heads:
        raise ModelError(f"{where}: hidden size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def gpt2_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """GPT-2. Raises ModelError for variants with cross-attention."""
    have = _convert(config, _Gpt2, where)
    if have.add_cross_attention:
        raise ModelError(f"{where} has add_cross_attention; decoder-only GPT-2 is supported")
    head_dim = _head_dim(have.n_embd, have.n_head, where)
    arch = ArchSpec(
        family="gpt2",
        num_layers=have.n_layer,
        hidden=have.n_embd,
        num_heads=have.n_head,
        num_kv_heads=have.n_head,
        head_dim=head_dim,
        ffn=have.n_inner or 4 * have.n_embd,
        vocab_size=have.vocab_size,
        norm_eps=have.layer_norm_epsilon,
        rope=RopeSpec(dim=head_dim),
        max_position=have.n_positions,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        body=GptBody(
            activation=_activation(have.activation_function, where),
            learned_positions=have.n_positions,
            attention_scale=0.0 if have.scale_attn_weights else 1.0,
            scale_by_layer=have.scale_attn_by_inverse_layer_idx,
        ),
        **_shared(config, generation, where, tied=True),
    )
    return checked(arch, where)


def gpt_neox_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """GPT-NeoX, Pythia."""
    have = _convert(config, _GptNeoX, where)
    head_dim = _head_dim(have.hidden_size, have.num_attention_heads, where)
    arch = ArchSpec(
        family="gpt_neox",
        num_layers=have.num_hidden_layers,
        hidden=have.hidden_size,
        num_heads=have.num_attention_heads,
        num_kv_heads=have.num_attention_heads,
        head_dim=head_dim,
        ffn=have.intermediate_size,
        vocab_size=have.vocab_size,
        norm_eps=have.layer_norm_eps,
        rope=_rope(config, head_dim, where, rope_theta=have.rotary_emb_base, partial_rotary_factor=have.rotary_pct),
        max_position=have.max_position_embeddings,
        qkv_bias=have.attention_bias,
        o_bias=have.attention_bias,
        mlp_bias=True,
        body=GptBody(activation=_activation(have.hidden_act, where), parallel=have.use_parallel_residual),
        **_shared(config, generation, where, tied=False),
    )
    return checked(arch, where)


def falcon_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """Falcon with rotary positions. Raises ModelError for the ALiBi variants (falcon-rw)."""
    have = _convert(config, _Falcon, where)
    if have.alibi:
        raise ModelError(f"{where} has ALiBi positions (alibi: true); Falcon with rotary positions is supported")
    heads, new = have.num_attention_heads, have.new_decoder_architecture
    if new and not have.parallel_attn:
        raise ModelError(f"{where} has new_decoder_architecture without parallel_attn, which is not supported")
    head_dim = _head_dim(have.hidden_size, heads, where)
    norms: Literal["two", "shared", "separate"] = "shared" if have.parallel_attn else "two"
    if new and have.num_ln_in_parallel_attn != 1:
        norms = "separate"
    arch = ArchSpec(
        family="falcon",
        num_layers=have.num_hidden_layers,
        hidden=have.hidden_size,
        num_heads=heads,
        num_kv_heads=(have.num_kv_heads or heads) if new else 1 if have.multi_query else heads,
        head_dim=head_dim,
        ffn=have.ffn_hidden_size or 4 * have.hidden_size,
        vocab_size=have.vocab_size,
        norm_eps=have.layer_norm_epsilon,
        rope=_rope(config, head_dim, where),
        max_position=have.max_position_embeddings,
        qkv_bias=have.bias,
        o_bias=have.bias,
        mlp_bias=have.bias,
        body=GptBody(activation=_activation(have.activation, where), parallel=new or have.parallel_attn, norms=norms),
        **_shared(config, generation, where, tied=True),
    )
    return checked(arch, where)


def llama4_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """The text model of Llama 4, alone (llama4_text) or in a multimodal checkpoint (llama4)."""
    outer = config
    if isinstance(config.get("text_config"), dict):
        config = {name: outer[name] for name in ("dtype", "torch_dtype", "tie_word_embeddings") if name in outer}
        config |= outer["text_config"]
        config |= {"quantization_config": outer.get("quantization_config")}
    have = _convert(config, _Llama4, where)
    _only_silu(have.hidden_act, where)
    layers = range(have.num_hidden_layers)
    head_dim = have.head_dim or _head_dim(have.hidden_size, have.num_attention_heads, where)
    rotates = have.no_rope_layers or [int((layer + 1) % have.no_rope_layer_interval != 0) for layer in layers]
    if len(rotates) < len(layers):
        raise ModelError(f"{where}: {len(rotates)} no_rope_layers for {len(layers)} layers")
    unrotated = tuple(layer for layer in layers if not rotates[layer])
    step = have.interleave_moe_layer_step
    moe_layers = list(range(step - 1, len(layers), step)) if have.moe_layers is None else have.moe_layers
    if unknown := [layer for layer in moe_layers if layer not in layers]:
        raise ModelError(f"{where}: moe_layers {unknown[:8]} of {len(layers)} layers")
    body = MoeBody(
        num_experts=have.num_local_experts,
        top_k=have.num_experts_per_tok,
        moe_layers=tuple(moe_layers),
        router="sigmoid",
        dense_ffn=have.intermediate_size_mlp,
        shared_expert=True,
        no_rope_layers=unrotated,
        attention_chunk=_attention_chunk(have, unrotated, where),
        unit_qk_norm=have.use_qk_norm,
        temperature=(have.attn_scale, have.floor_scale) if have.attn_temperature_tuning else None,
        wrapped=config is not outer,
    )
    arch = ArchSpec(
        family="llama4",
        **_sizes(have, head_dim),
        ffn=have.intermediate_size,
        rope=_rope(config, head_dim, where, rope_theta=500000.0),
        qkv_bias=have.attention_bias,
        o_bias=have.attention_bias,
        body=_checked_experts(body, where),
        **_shared(config, generation, where, tied=False),
    )
    return checked(arch, where)


def _attention_chunk(have: _Llama4, unrotated: tuple[int, ...], where: Path) -> int:
    """Attention chunk of rotary layers, in tokens. Raises ModelError where the config pairs layers and attention types
    differently."""
    if have.layer_types is not None:
        full = tuple(layer for layer, kind in enumerate(have.layer_types) if kind == "full_attention")
        if len(full) == have.num_hidden_layers:
            return 0
        if full != unrotated or set(have.layer_types) - {"full_attention", "chunked_attention"}:
            raise ModelError(f"{where}: layer_types is supported where the layers without rotation are the full ones")
    return have.attention_chunk_size or 0


def _sizes(have: _Llama4 | _GptOss | _Mixtral | _Qwen3Moe, head_dim: int) -> dict[str, Any]:
    """Fields that every mixture of experts spells alike."""
    return {
        "num_layers": have.num_hidden_layers,
        "hidden": have.hidden_size,
        "num_heads": have.num_attention_heads,
        "num_kv_heads": have.num_key_value_heads or have.num_attention_heads,
        "head_dim": head_dim,
        "vocab_size": have.vocab_size,
        "norm_eps": have.rms_norm_eps,
        "max_position": have.max_position_embeddings,
    }


def gpt_oss_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """GPT-OSS, with dense or MXFP4 experts."""
    have = _convert(config, _GptOss, where)
    _only_silu(have.hidden_act, where)
    layers = range(have.num_hidden_layers)
    kinds = have.layer_types or [("sliding_attention", "full_attention")[layer % 2] for layer in layers]
    if len(kinds) != len(layers) or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"{where}: layer_types must be full_attention or sliding_attention for {len(layers)} layers")
    head_dim = have.head_dim or _head_dim(have.hidden_size, have.num_attention_heads, where)
    body = MoeBody(
        num_experts=have.num_local_experts,
        top_k=have.num_experts_per_tok,
        moe_layers=tuple(layers),
        router="softmax",
        biases=True,
        glu_limit=have.swiglu_limit,
        glu_alpha=have.swiglu_alpha,
        mxfp4=config.get("quantization_config") is not None,
        sinks=True,
    )
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    arch = ArchSpec(
        family="gpt_oss",
        **_sizes(have, head_dim),
        ffn=have.intermediate_size,
        rope=_rope(config, head_dim, where, rope_theta=150000.0, rope_scaling=yarn),
        qkv_bias=have.attention_bias,
        o_bias=have.attention_bias,
        sliding_window=have.sliding_window,
        full_attention_layers=tuple(layer for layer in layers if kinds[layer] == "full_attention"),
        body=_checked_experts(body, where),
        **_shared(config, generation, where, tied=False),
    )
    return checked(arch, where)


def mixtral_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """Mixtral."""
    have = _convert(config, _Mixtral, where)
    _only_silu(have.hidden_act, where)
    head_dim = have.head_dim or _head_dim(have.hidden_size, have.num_attention_heads, where)
    body = MoeBody(
        num_experts=have.num_local_experts,
        top_k=have.num_experts_per_tok,
        moe_layers=tuple(range(have.num_hidden_layers)),
        router="softmax",
        expert_names=("w1", "w3", "w2"),
    )
    arch = ArchSpec(
        family="mixtral",
        **_sizes(have, head_dim),
        ffn=have.intermediate_size,
        rope=_rope(config, head_dim, where, rope_theta=1000000.0),
        sliding_window=have.sliding_window,
        body=_checked_experts(body, where),
        **_shared(config, generation, where, tied=False),
    )
    return checked(arch, where)


def qwen3_moe_from_config(config: dict[str, Any], generation: dict[str, Any], where: Path) -> ArchSpec:
    """Qwen3-MoE. Raises ModelError for sliding windows, and for router scores that are not normalized over the chosen experts."""
    have = _convert(config, _Qwen3Moe, where)
    _only_silu(have.hidden_act, where)
    if have.use_sliding_window:
        raise ModelError(f"{where} has use_sliding_window, which is not supported for qwen3_moe")
    if not have.norm_topk_prob:
        raise ModelError(f"{where} has norm_topk_prob false; qwen3_moe is supported with true")
    head_dim = have.head_dim or _head_dim(have.hidden_size, have.num_attention_heads, where)
    step, dense = have.decoder_sparse_step, set(have.mlp_only_layers or ())
    body = MoeBody(
        num_experts=have.num_experts or have.num_local_experts,
        top_k=have.num_experts_per_tok,
        moe_layers=tuple(i for i in range(have.num_hidden_layers) if i not in dense and (i + 1) % step == 0),
        router="softmax",
        dense_ffn=have.intermediate_size,
        expert_names=("gate_proj", "up_proj", "down_proj"),
    )
    arch = ArchSpec(
        family="qwen3_moe",
        **_sizes(have, head_dim),
        ffn=have.moe_intermediate_size,
        rope=_rope(config, head_dim, where),
        qkv_bias=have.attention_bias,
        o_bias=have.attention_bias,
        qk_norm=True,
        body=_checked_experts(body, where),
        **_shared(config, generation, where, tied=False),
    )
    return checked(arch, where)


def _only_silu(activation: str, where: Path) -> None:
    if activation != "silu":
        raise ModelError(f"{where} has hidden_act {activation!r}; silu is supported")


def _checked_experts(body: MoeBody, where: Path) -> MoeBody:
    if body.top_k > body.num_experts:
        raise ModelError(f"{where}: {body.top_k} experts per token of {body.num_experts}")
    return body


READERS = {
    "gpt2": gpt2_from_config,
    "gpt_neox": gpt_neox_from_config,
    "falcon": falcon_from_config,
    "llama4": llama4_from_config,
    "llama4_text": llama4_from_config,
    "gpt_oss": gpt_oss_from_config,
    "mixtral": mixtral_from_config,
    "qwen3_moe": qwen3_moe_from_config,
}

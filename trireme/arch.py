"""ArchSpec: everything that shapes a decoder-only model, read from a Hugging Face config.json or a GGUF header.

Pure data and torch-free: the resolver and the budget use it before any weight is touched. Code that comes with a model
(auto_map) is never looked at.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from trireme.errors import ModelError
from trireme.gguf import GgufFile, read_gguf
from trireme.packaged import ModelFiles, find_model, read_json

RopeKind = Literal["default", "linear", "llama3", "yarn"]


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding. `dim` is the number of rotated dimensions per head."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    dim: int = 0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: derived from the kind


class ArchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model; defaults are the Llama case. Sizes in elements."""

    family: str  # row of the family table: llama, mistral, qwen2, qwen3, stub
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope: RopeSpec = RopeSpec()
    max_position: int = 2048
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # layers that ignore sliding_window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    weights_dtype: str = "float32"  # as stored: a float dtype name, or "gguf"
    source: Literal["gguf", "safetensors", "stub"] = "safetensors"
    stub: dict[str, object] = {}  # settings of the test models (family "stub")


# Architectures by the name in the file. Everything else that differs is a field of ArchSpec.
HF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")

_MAX_DIM = 1 << 24
_Dim = Annotated[int, Meta(ge=1, le=_MAX_DIM)]
_Positive = Annotated[float, Meta(gt=0)]


def read_arch(model: str | Path | ModelFiles) -> ArchSpec:
    """The shape of a model, from config.json or a GGUF header; no weight is read. Raises ModelError that names the file,
    the field and what is supported."""
    files = model if isinstance(model, ModelFiles) else find_model(model)
    if files.kind == "gguf":
        return arch_from_gguf(read_gguf(files.path, arrays=False))
    config = read_json(files.path / "config.json")
    if files.kind == "stub":
        return _arch_from_stub(config, files.path)
    return arch_from_config(config, read_json(files.path / "generation_config.json"), files.path / "config.json")


# ---------------------------------------------------------------- config.json


class _HfRope(msgspec.Struct, frozen=True):
    rope_type: str | None = None
    type: str | None = None  # the older name of rope_type
    rope_theta: _Positive | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive = 1.0
    high_freq_factor: _Positive = 4.0
    original_max_position_embeddings: _Dim | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float | None = None


class _HfConfig(msgspec.Struct, frozen=True):
    model_type: str
    hidden_size: _Dim
    num_hidden_layers: Annotated[int, Meta(ge=1, le=4096)]
    num_attention_heads: _Dim
    intermediate_size: _Dim
    vocab_size: _Dim
    num_key_value_heads: _Dim | None = None
    head_dim: _Dim | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(ge=0, le=1)] = 1e-6
    max_position_embeddings: _Dim = 2048
    tie_word_embeddings: bool | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: _HfRope | None = None
    rope_parameters: _HfRope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: _Dim | None = None
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
    family = config.get("model_type")
    if family not in HF_FAMILIES:
        raise ModelError(f"{where} is of type {family!r}; supported types are {', '.join(HF_FAMILIES)}")
    try:
        have = msgspec.convert(config, _HfConfig)
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
    rope = _rope_from_config(have, head_dim, where)
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
        bos_token_id=next(iter(_token_list(have.bos_token_id)), None),
        eos_token_ids=tuple(
            dict.fromkeys([*_token_list(generation.get("eos_token_id")), *_token_list(have.eos_token_id)])
        ),
        pad_token_id=have.pad_token_id,
        weights_dtype=have.dtype or have.torch_dtype or "float32",
    )
    return _checked(arch, where)


def _rope_from_config(have: _HfConfig, head_dim: int, where: Path) -> RopeSpec:
    """rope_parameters (transformers 5) or rope_theta with rope_scaling (before)."""
    rope = have.rope_parameters or have.rope_scaling or _HfRope()
    kind = _rope_kind(rope.rope_type or rope.type or "default", where)
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
    if kind == "yarn" and not rope.truncate:
        raise ModelError(f"{where}: YaRN without truncated bounds (truncate: false) is not supported")
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
    )


def _rope_kind(name: str, where: Path) -> RopeKind:
    kinds: dict[str, RopeKind] = {"none": "default", **{kind: kind for kind in get_args(RopeKind)}}
    if name not in kinds:
        raise ModelError(f"{where} has rope scaling of type {name!r}; supported are {', '.join(kinds)}")
    return kinds[name]


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, section 3.4): 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(have: _HfConfig, where: Path) -> tuple[int | None, tuple[int, ...]]:
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


def _token_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def _arch_from_stub(config: dict[str, Any], where: Path) -> ArchSpec:
    eos = config.get("eos_token_id")
    try:
        return ArchSpec(
            family="stub",
            num_layers=2,
            hidden=16,
            num_heads=4,
            num_kv_heads=4,
            head_dim=8,
            ffn=32,
            vocab_size=int(config["vocab_size"]),
            max_position=int(config.get("max_position_embeddings", 4096)),
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else (int(eos),),
            pad_token_id=config.get("pad_token_id"),
            source="stub",
            stub=dict(config.get("stub", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{where / 'config.json'} of a stub model: {error!r}") from error


# ---------------------------------------------------------------- GGUF


def arch_from_gguf(file: GgufFile) -> ArchSpec:
    """ArchSpec of a GGUF file from its metadata, and from which tensors it has (biases, norms, output matrix)."""
    family = file.text("general.architecture")
    if family not in GGUF_FAMILIES:
        raise ModelError(f"{file.path} is of type {family!r}; supported GGUF types are {', '.join(GGUF_FAMILIES)}")
    if file.whole("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of several", hint="llama-gguf-split --merge makes one file of them")
    if file.whole(f"{family}.expert_count", 0) > 0:
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported yet")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no matrix token_embd.weight")
    hidden = _dim(file, f"{family}.embedding_length")
    heads = _dim(file, f"{family}.attention.head_count")
    head_dim = _dim(file, f"{family}.attention.key_length", hidden // heads)
    if file.whole(f"{family}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path} has values of another size than its keys, which is not supported")
    arch = ArchSpec(
        family=family,
        num_layers=_dim(file, f"{family}.block_count"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_dim(file, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=_dim(file, f"{family}.feed_forward_length"),
        vocab_size=embedding.num_rows,
        norm_eps=file.real(f"{family}.attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(file, family, head_dim),
        max_position=_dim(file, f"{family}.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=file.whole(f"{family}.attention.sliding_window", 0) or None,
        bos_token_id=_token(file, "bos"),
        eos_token_ids=tuple(
            dict.fromkeys(t for t in (_token(file, k) for k in ("eos", "eot", "eom")) if t is not None)
        ),
        pad_token_id=_token(file, "padding"),
        weights_dtype="gguf",
        source="gguf",
    )
    return _checked(arch, file.path)


def _rope_from_gguf(file: GgufFile, family: str, head_dim: int) -> RopeSpec:
    """Keys <family>.rope.*; the Llama 3 rule is not here but in the tensor rope_freqs.weight, which the loader applies."""
    at = f"{family}.rope."
    kind = _rope_kind(file.text(at + "scaling.type", "none"), file.path)
    factor = file.real(at + "scaling.factor", file.real(at + "scale_linear", 1.0))
    if kind == "default" and factor not in (0.0, 1.0):
        kind = "linear"
    factor = factor or 1.0
    attention = None
    if kind == "yarn" and at + "scaling.attn_factor" in file.metadata:
        attention = file.real(at + "scaling.attn_factor") * yarn_scale(factor)
    return RopeSpec(
        kind=kind,
        theta=file.real(at + "freq_base", 10000.0),
        dim=_dim(file, at + "dimension_count", head_dim),
        factor=factor,
        original_max_position=file.whole(
            at + "scaling.original_context_length", file.whole(f"{family}.context_length")
        ),
        beta_fast=file.real(at + "scaling.yarn_beta_fast", 32.0),
        beta_slow=file.real(at + "scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def _dim(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.whole(key, default)
    if not 1 <= value <= _MAX_DIM:
        raise ModelError(f"{file.path}: {key} is {value}; it must be 1 to {_MAX_DIM}")
    return value


def _token(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.whole(key) if key in file.metadata else None


def _checked(arch: ArchSpec, where: Path) -> ArchSpec:
    """Relations between fields that the kernels rely on."""
    if arch.num_layers > 4096:
        raise ModelError(f"{where}: {arch.num_layers} layers; at most 4096 are possible")
    if arch.num_heads % arch.num_kv_heads:
        raise ModelError(f"{where}: {arch.num_heads} heads are not a multiple of {arch.num_kv_heads} KV heads")
    if arch.head_dim % 8:
        raise ModelError(f"{where}: head_dim {arch.head_dim} is not a multiple of 8")
    if not 2 <= arch.rope.dim <= arch.head_dim or arch.rope.dim % 2:
        raise ModelError(f"{where}: {arch.rope.dim} rotated dimensions in heads of {arch.head_dim}")
    if not (math.isfinite(arch.norm_eps) and 0 <= arch.norm_eps <= 1 and arch.rope.theta > 0 and arch.rope.factor > 0):
        raise ModelError(f"{where}: norm eps {arch.norm_eps}, rope theta {arch.rope.theta}, factor {arch.rope.factor}")
    for token in (*arch.eos_token_ids, *([arch.bos_token_id] if arch.bos_token_id is not None else [])):
        if not 0 <= token < arch.vocab_size:
            raise ModelError(f"{where}: token id {token} is outside the vocabulary of {arch.vocab_size}")
    return arch

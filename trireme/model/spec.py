"""ArchSpec: everything that shapes a decoder-only model, and the checks that its readers share.

Pure data and torch-free. Filled by the readers (gguf_config, hf_config, hf_families), used by the resolver, the budget and the
bodies in models/arch; imports no reader.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trireme.errors import ModelError
from trireme.model.bodies import GptBody, MoeBody
from trireme.model.packed_ints import Packing

RopeKind = Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]
# Position of norms: before each branch, after it, both; or one before parallel attention and FFN.
NormPlacement = Literal["pre", "post", "both", "parallel"]

MAX_DIM = 1 << 24
MAX_SCALE = 1e6
Dim = Annotated[int, Meta(ge=1, le=MAX_DIM)]
Positive = Annotated[float, Meta(gt=0)]


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
    short_factors: tuple[float, ...] = ()  # longrope: frequency divisors up to original_max_position
    long_factors: tuple[float, ...] = ()  # and beyond it
    pairs: bool = False  # the file's q and k outputs are ordered by rotated pairs (0, 1), (2, 3), ..., not by halves
    truncate: bool = True  # YaRN: the bounds of its ramp are rounded to whole pairs


class ArchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model; defaults are the Llama case. Sizes in elements."""

    family: str  # entry of the family table in models/registry, or stub
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
    # one vector shared by all heads; one over all heads concatenated; or one per head
    qk_norm_kind: Literal["head", "wide", "heads"] = "head"
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the FFN gate
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: float = 0.0  # added to stored norm weights
    norm_placement: NormPlacement = "pre"
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of each branch before it is added
    attn_scale: float = 0.0  # of scores; 0: head_dim ** -0.5
    attn_softcap: float = 0.0  # cap * tanh(score / cap); 0: none
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    unit_head: bool = False  # rows of the output matrix are normalized to length 1
    rope_local: RopeSpec | None = None  # of sliding-window layers, where it differs
    no_rope_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # layers without sliding_window
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    weights_dtype: str = "float32"  # as stored: a float dtype name, or "gguf"
    weights_kind: str = ""  # of quantized checkpoints: matrix kind (models.weights.sources.RawMatrix) of the layers
    packing: Packing | None = None  # of packed-integer checkpoints
    source: Literal["gguf", "safetensors", "stub"] = "safetensors"
    body: GptBody | MoeBody | None = None  # of families that are not Llama-like decoders
    stub: dict[str, object] = {}  # settings of the test models (family "stub")


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN (arXiv 2309.00071, section 3.4): 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def token_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if isinstance(token, int) and not isinstance(token, bool)]


def checked(arch: ArchSpec, where: Path) -> ArchSpec:
    """Validates relations between fields that the kernels rely on. Raises ModelError."""
    if arch.num_layers > 4096:
        raise ModelError(f"{where}: {arch.num_layers} layers; at most 4096 are possible")
    if arch.num_heads % arch.num_kv_heads:
        raise ModelError(f"{where}: {arch.num_heads} heads are not a multiple of {arch.num_kv_heads} KV heads")
    if arch.head_dim % 8:
        raise ModelError(f"{where}: head_dim {arch.head_dim} is not a multiple of 8")
    for name in ("embed_scale", "residual_scale", "logit_scale", "attn_scale", "attn_softcap", "logit_softcap"):
        if not abs(getattr(arch, name)) <= MAX_SCALE:
            raise ModelError(f"{where}: {name} is {getattr(arch, name)}; at most {MAX_SCALE:g} is possible")
    if arch.sliding_window is not None and not 1 <= arch.sliding_window <= MAX_DIM:
        raise ModelError(f"{where}: a sliding window of {arch.sliding_window}; it must be 1 to {MAX_DIM}")
    if not (math.isfinite(arch.norm_eps) and 0 <= arch.norm_eps <= 1):
        raise ModelError(f"{where}: norm eps {arch.norm_eps}")
    for rope in filter(None, (arch.rope, arch.rope_local)):
        _check_rope(rope, arch.head_dim, where)
    for token in (*arch.eos_token_ids, *([arch.bos_token_id] if arch.bos_token_id is not None else [])):
        if not 0 <= token < arch.vocab_size:
            raise ModelError(f"{where}: token id {token} is outside the vocabulary of {arch.vocab_size}")
    return arch


def _check_rope(rope: RopeSpec, head_dim: int, where: Path) -> None:
    """Validates every number of a RopeSpec against plausible bounds. Raises ModelError that names it."""
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        raise ModelError(f"{where}: {rope.dim} rotated dimensions in heads of {head_dim}")
    attention = 1.0 if rope.attention_factor is None else rope.attention_factor
    for name, value, low, high in (
        ("rope theta", rope.theta, 1.0, 1e15),
        ("rope factor", rope.factor, 1e-6, 1e6),
        ("low_freq_factor", rope.low_freq_factor, 1e-3, 1e6),
        ("high_freq_factor", rope.high_freq_factor, 1e-3, 1e6),
        ("beta_fast", rope.beta_fast, 1e-3, 1e6),
        ("beta_slow", rope.beta_slow, 1e-3, 1e6),
        ("attention_factor", attention, 1e-3, 1e3),
        *(("short_factor", factor, 1e-3, 1e6) for factor in rope.short_factors),
        *(("long_factor", factor, 1e-3, 1e6) for factor in rope.long_factors),
    ):
        if not low <= value <= high:  # (also rejects NaN)
            raise ModelError(f"{where}: {name} is {value}; it must be {low:g} to {high:g}")
    if rope.theta == 1.0 and rope.kind in ("yarn", "dynamic"):
        raise ModelError(f"{where}: rope theta is 1, with which {rope.kind} cannot be")
    if rope.kind == "dynamic" and rope.dim < 4:
        raise ModelError(f"{where}: {rope.dim} rotated dimensions are too few for {rope.kind} rope scaling")
    if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError(
            f"{where}: high_freq_factor {rope.high_freq_factor} is not above low_freq_factor {rope.low_freq_factor}"
        )
    if rope.kind in ("llama3", "yarn", "dynamic", "longrope") and rope.original_max_position < 2:
        raise ModelError(f"{where}: {rope.original_max_position} trained positions of {rope.kind} rope scaling")

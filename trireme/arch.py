"""ArchSpec: everything that shapes a decoder-only model, read from a Hugging Face config.json or a GGUF header.

Pure data and torch-free: the resolver and the budget use it before any weight is touched. (Readers follow below.)
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RopeSpec(msgspec.Struct, frozen=True):
    """Rotary embedding. `dim` is the number of rotated dimensions per head."""

    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    weights_dtype: str = "float32"  # as stored: a float dtype name, or "gguf"
    source: Literal["gguf", "safetensors", "stub"] = "safetensors"
    stub: dict[str, object] = {}  # settings of the test models (family "stub")

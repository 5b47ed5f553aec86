"""Weights of one stage of the Llama-like families on one rank: names, shards and packed matrices. No torch.

Used by models/cpu/native_stage (all layers in one native call) and models/cpu/decoder (layer by layer in torch). ArchSpec
holds the differences between families.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from trireme.model.reader import ArchSpec
from trireme.models.arch.names import NORM_NAMES
from trireme.models.arch.rope import _LONGROPE, complete_rope, cos_sin_table
from trireme.models.cpu.packed_linear import PackedLinear
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import WeightSource, raw_from_floats
from trireme.topology.mesh import Mesh, Span, split_evenly, split_heads


def weight_names(arch: ArchSpec) -> Iterator[str]:
    """Every weight of the whole model, all stages, by Hugging Face name."""
    suffixes = (".weight", ".bias") if arch.norm_bias else (".weight",)
    yield "model.embed_tokens.weight"
    yield from ("model.norm" + suffix for suffix in suffixes)
    if not arch.tie_embeddings:
        yield "lm_head.weight"
    biased = {"self_attn.q_proj": arch.qkv_bias, "self_attn.k_proj": arch.qkv_bias, "self_attn.v_proj": arch.qkv_bias}
    biased |= {"self_attn.o_proj": arch.o_bias}
    biased |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), arch.mlp_bias)
    for layer in range(arch.num_layers):
        at = f"model.layers.{layer}."
        for name in filter(None, NORM_NAMES[arch.norm_placement]):
            yield from (at + name + suffix for suffix in suffixes)
        for name, has_bias in biased.items():
            yield f"{at}{name}.weight"
            if has_bias:
                yield f"{at}{name}.bias"
        if arch.qk_norm:
            yield at + "self_attn.q_norm.weight"
            yield at + "self_attn.k_norm.weight"


def ignorable_names(arch: ArchSpec) -> list[str]:
    """Names that a file may contain or omit: derivable frequencies (models/arch/agreement.py checks them), their divisors and
    longrope factors, and a tied head."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(arch.num_layers)]
    names += ["model.rotary_emb.inv_freq", "rope_freqs.weight"]
    names += _LONGROPE if arch.rope.kind == "longrope" and not arch.rope.short_factors else ()
    return [*names, "lm_head.weight"] if arch.tie_embeddings else names


class NormWeights(NamedTuple):
    """A norm's weight [H] and its bias, if it has one."""

    weight: Floats
    bias: Floats | None


class ColumnShares:
    """Column spans of every rank. Every matrix is split by outputs, never along the inputs: each output is one sum in one
    order for any number of ranks, so TP is bit-exact."""

    def __init__(self, arch: ArchSpec, tp: int) -> None:
        self.q: list[Span] = []
        self.kv: list[Span] = []
        for rank in range(tp):
            heads = split_heads(arch.num_heads, arch.num_kv_heads, tp, rank)
            self.q.append(_scaled(heads.q, arch.head_dim))
            self.kv.append(_scaled(heads.kv, arch.head_dim))
        self.ffn = _split(arch.ffn, tp)
        self.hidden = _split(arch.hidden, tp)
        self.vocab = _split(arch.vocab_size, tp)


class _Builder:
    """Slices one rank's shard out of the source, layer by layer. Not retained: the files are unmapped when it is freed."""

    def __init__(
        self, arch: ArchSpec, shares: ColumnShares, rank: int, source: WeightSource, dense: str | None
    ) -> None:
        self.arch = arch
        self.shares = shares
        self.rank = rank
        self.source = source
        self.vector = source.vector
        self._dense = dense

    def linear(
        self, at: str, parts: list[tuple[str, int, Span]], k: int, *, bias: bool, unit: bool = False
    ) -> PackedLinear:
        """A linear layer over matrices with k inputs, fused along their outputs; `parts` are (name, total outputs, outputs
        of this rank). `unit` normalizes every output's weights to length 1."""
        matrices = [self.source.matrix(f"{at}{name}.weight", n, k).rows(rows) for name, n, rows in parts]
        if unit:
            matrices = [raw_from_floats(_unit_rows(matrix.as_float32())) for matrix in matrices]
        biases = [self.vector(f"{at}{name}.bias", n)[rows.start : rows.stop] for name, n, rows in parts if bias]
        return PackedLinear([matrix.computable(self._dense) for matrix in matrices], biases)

    def norm(self, name: str) -> NormWeights | None:
        """The norm `name`; None if the name is empty."""
        if not name:
            return None
        arch = self.arch
        weight = self._norm_weight(name, arch.hidden)
        bias = self.vector(name + ".bias", arch.hidden) if arch.norm_bias else None
        return NormWeights(weight, bias)

    def qk_norm(self, name: str, heads: Span, total: int) -> Floats | None:
        """Norm weights of q or k; `heads` are this rank's columns out of `total`."""
        arch = self.arch
        if not arch.qk_norm:
            return None
        if arch.qk_norm_kind == "head":
            return self._norm_weight(name, arch.head_dim)
        whole = self._norm_weight(name, total)
        return whole if arch.qk_norm_kind == "wide" else whole[heads.start : heads.stop]

    def _norm_weight(self, name: str, size: int) -> Floats:
        weight = self.vector(name + ".weight", size)
        return weight + np.float32(self.arch.norm_offset) if self.arch.norm_offset else weight


def _unit_rows(values: Floats) -> Floats:
    """Normalizes every output's weights to length 1."""
    lengths = np.sqrt(np.square(values, dtype=np.float64).sum(axis=1, keepdims=True))
    return (values / np.maximum(lengths, 1e-12)).astype(np.float32)


def _split(total: int, parts: int) -> list[Span]:
    """Spans of all ranks, in whole tiles of 16 where possible."""
    unit = 16 if total % 16 == 0 and total // 16 >= parts else 1
    return [split_evenly(total, parts, part, unit=unit) for part in range(parts)]


def _scaled(span: Span, factor: int) -> Span:
    return Span(span.start * factor, span.stop * factor)


def sizes_of(spans: list[Span]) -> list[int]:
    return [span.size for span in spans]


class LayerWeights:
    """Weights of one layer; NativeDecoder and TorchDecoder compute with them."""

    __slots__ = (
        "attn_norm",
        "attn_post",
        "cos_sin",
        "down",
        "ffn_norm",
        "ffn_post",
        "gate_up",
        "is_local",
        "k_norm",
        "o",
        "q_norm",
        "qkv",
        "rotates",
        "window",
    )

    def __init__(self, build: _Builder, index: int) -> None:
        arch, shares, at, rank = build.arch, build.shares, f"model.layers.{index}.", build.rank
        dim, hidden, ffn = arch.head_dim, arch.hidden, arch.ffn
        q_rows, kv_rows = arch.num_heads * dim, arch.num_kv_heads * dim
        q, kv, ffn_part, hidden_part = shares.q[rank], shares.kv[rank], shares.ffn[rank], shares.hidden[rank]
        norms = [build.norm(at + name if name else "") for name in NORM_NAMES[arch.norm_placement]]
        self.attn_norm, self.attn_post, self.ffn_norm, self.ffn_post = norms
        self.q_norm = build.qk_norm(at + "self_attn.q_norm", q, q_rows)
        self.k_norm = build.qk_norm(at + "self_attn.k_norm", kv, kv_rows)
        qkv = [("q_proj", q_rows, q), ("k_proj", kv_rows, kv), ("v_proj", kv_rows, kv)]
        self.qkv = build.linear(at + "self_attn.", qkv, hidden, bias=arch.qkv_bias)
        self.o = build.linear(at + "self_attn.", [("o_proj", hidden, hidden_part)], q_rows, bias=arch.o_bias)
        gate_up = [("gate_proj", ffn, ffn_part), ("up_proj", ffn, ffn_part)]
        self.gate_up = build.linear(at + "mlp.", gate_up, hidden, bias=arch.mlp_bias)
        self.down = build.linear(at + "mlp.", [("down_proj", hidden, hidden_part)], ffn, bias=arch.mlp_bias)
        self.window = None if index in arch.full_attention_layers else arch.sliding_window
        self.is_local = self.window is not None and arch.rope_local is not None
        self.rotates = index not in arch.no_rope_layers
        self.cos_sin = np.empty((0, 0), np.float32)  # set by StageWeights, which shares tables

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.o, self.gate_up, self.down))


class StageWeights:
    """All weights of one stage on one rank. `head` and `embedding` are one object if tied."""

    def __init__(
        self,
        arch: ArchSpec,
        mesh: Mesh,
        source: WeightSource,
        *,
        dense: str | None,
        progress: Callable[[str, int, int], None],
        max_len: int | None,
    ) -> None:
        self.arch = arch
        self.shares = ColumnShares(arch, mesh.tp)
        build = _Builder(arch, self.shares, mesh.tp_rank, source, dense)
        stage = mesh.layers(arch.num_layers)
        total = stage.size + (1 if mesh.is_first_stage or mesh.is_last_stage else 0)
        progress("weights", 0, total)
        self.layers: list[LayerWeights] = []
        for done, index in enumerate(range(stage.start, stage.stop), start=1):
            self.layers.append(LayerWeights(build, index))
            progress("weights", done, total)
        self._build_ends(build, mesh)
        progress("weights", total, total)
        self.rope = complete_rope(arch.rope, build.vector)
        self._share_tables(build, max_len or arch.max_position)

    def _build_ends(self, build: _Builder, mesh: Mesh) -> None:
        """Embedding on the first stage, norm and head on the last; tied ends share one matrix."""
        arch, rows = self.arch, self.shares.vocab[mesh.tp_rank]
        self.head: PackedLinear | None = None
        self.embedding: PackedLinear | None = None
        self.norm: NormWeights | None = None
        if mesh.is_last_stage:
            name = "model.embed_tokens" if arch.tie_embeddings else "lm_head"
            self.head = build.linear("", [(name, arch.vocab_size, rows)], arch.hidden, bias=False, unit=arch.unit_head)
            self.norm = build.norm("model.norm")
        if mesh.is_first_stage:
            own = [("model.embed_tokens", arch.vocab_size, rows)]
            shared = self.head if arch.tie_embeddings else None
            self.embedding = shared or build.linear("", own, arch.hidden, bias=False)

    def _share_tables(self, build: _Builder, positions: int) -> None:
        """Builds the cos/sin tables and assigns each layer the one it reads."""
        arch, name = self.arch, "rope_freqs.weight"
        divisors = build.vector(name, arch.rope.dim // 2) if name in build.source.names() else None
        table = cos_sin_table(self.rope, positions, divisors)
        local = None if arch.rope_local is None else cos_sin_table(arch.rope_local, positions)
        still = np.empty((positions, 0), np.float32)  # no rotated dimensions
        for layer in self.layers:
            rotated = local if layer.is_local and local is not None else table
            layer.cos_sin = rotated if layer.rotates else still
        self.tables = [table] if local is None else [table, local]

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights and tables."""
        embed_head = {id(end): end.nbytes for end in (self.head, self.embedding) if end is not None}
        layers = sum(layer.nbytes for layer in self.layers)
        return layers + sum(embed_head.values()) + sum(table.nbytes for table in self.tables)


def soft_capped(logits: Floats, arch: ArchSpec) -> None:
    """Applies the family's logit scale and soft cap, in place."""
    if arch.logit_scale != 1.0:
        logits *= np.float32(arch.logit_scale)
    if arch.logit_softcap:
        cap = np.float32(arch.logit_softcap)
        np.divide(logits, cap, out=logits)
        np.tanh(logits, out=logits)
        np.multiply(logits, cap, out=logits)

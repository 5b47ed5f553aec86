"""Loads the weights of the GPU body: those of one layer, and each kind of weight from its source.

Called by models/cuda/decoder while a model is built.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trireme.model.bodies import MoeBody
from trireme.model.reader import ArchSpec
from trireme.models.arch.layer_config import LayerConfig
from trireme.models.arch.names import FEED_FORWARD, router_name
from trireme.models.arch.rope import complete_rope, cos_sin_table, long_table
from trireme.models.cuda.layers.linear import CudaLinear, make_linear
from trireme.models.cuda.layers.moe import CudaExperts
from trireme.models.cuda.layers.moe_ops import ExpertActivation
from trireme.models.cuda.layers.norm import CudaNorm
from trireme.models.cuda.layers.protocol import LinearLayer
from trireme.models.cuda.weights.experts import load_experts
from trireme.models.cuda.weights.sources import DeviceWeights
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.mesh import Span


class Parts:
    """Loads this rank's shard of layers and ends onto the current device. `weight_bytes` counts matrices loaded so far, not
    vectors.

    `source` yields a rank's shard by name (models/weights/tp_shards.py).
    """

    def __init__(
        self, arch: ArchSpec, form: LayerConfig, shares: RankSpans, source: DeviceWeights, dtype: torch.dtype
    ) -> None:
        self.arch, self.form, self.shares, self.dtype = arch, form, shares, dtype
        self.source = source
        self.weight_bytes = 0

    def norm(self, name: str) -> CudaNorm:
        """The norm `name` over hidden states."""
        hidden, form = self.arch.hidden, self.form
        bias = self.vector(name + ".bias", hidden) if form.has_norm_bias else None
        return CudaNorm(self.vector(name + ".weight", hidden), bias, self.arch.norm_eps, is_rms=form.is_rms)

    def head_norm(self, name: str, num_heads: int, own: Span) -> Tensor:
        """Weights of a q or k norm: one head's, all heads', or those of this rank's heads, by arch.qk_norm_kind."""
        kind, dim = self.arch.qk_norm_kind, self.arch.head_dim
        whole = self.vector(name, dim if kind == "head" else num_heads * dim)
        return whole[own.start : own.stop] if kind == "heads" else whole

    def vector(self, name: str, size: int) -> Tensor:
        """A norm or bias [size] in the model's dtype; norms include their offset."""
        values = self.source.vector(name, size)
        if self.arch.norm_offset and "norm" in name:
            values = values + np.float32(self.arch.norm_offset)
        return torch.from_numpy(np.ascontiguousarray(values)).to("cuda", self.dtype)

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        """[n, k] in the model's dtype."""
        weight = self.source.matrix(name, n, k)
        self.weight_bytes += weight.nbytes
        return weight

    def unit_matrix(self, name: str, n: int, k: int) -> Tensor:
        """Like matrix, with every output's weights normalized to length 1."""
        weight = self.matrix(name, n, k)
        return torch.nn.functional.normalize(weight.float(), eps=1e-12).to(weight.dtype)

    def linear(self, at: str, parts: list[tuple[str, int]], k: int, *, bias: bool) -> LinearLayer:
        """A linear layer over matrices with k inputs, fused along their outputs; `parts` are (name, outputs)."""
        factors = [self.source.factor(f"{at}{name}.weight", n, k) for name, n in parts]
        biases = [self.vector(f"{at}{name}.bias", n) for name, n in parts] if bias else []
        self.weight_bytes += sum(factor.nbytes for factor in factors)
        return make_linear(factors, torch.cat(biases) if biases else None)

    def experts(self, at: str) -> CudaExperts:
        """A router and its experts, each column-sharded to this rank."""
        body, shares = self.arch.body, self.shares
        assert isinstance(body, MoeBody)
        name = f"{at}.{router_name(body)}"
        router = self.matrix(name + ".weight", body.num_experts, self.arch.hidden)
        bias = self.vector(name + ".bias", body.num_experts) if body.biases else None
        weights = load_experts(self.source, at, self.arch, shares.ffn, self.dtype, adds_bias=shares.rank == 0)
        self.weight_bytes += weights.nbytes
        return CudaExperts(
            CudaLinear(router, bias), weights, body.top_k, ExpertActivation(body.glu_limit, body.glu_alpha)
        )

    def sinks(self, name: str) -> Tensor | None:
        """Sink logits [Hq] of this rank's heads, float32; None if the model has none."""
        if not (isinstance(self.arch.body, MoeBody) and self.arch.body.sinks):
            return None
        first = self.shares.q.start // self.arch.head_dim
        values = self.source.vector(name, self.arch.num_heads)[first : first + self.shares.q_heads]
        return torch.from_numpy(np.ascontiguousarray(values)).cuda()


class Rotations(NamedTuple):
    """cos/sin tables [entries, rotated dims] of the layers, indexed through models.arch.rope.table_rows."""

    all_layers: Tensor
    windowed: Tensor  # of layers with a window
    none: Tensor  # of layers without rotation

    def of_layer(self, arch: ArchSpec, form: LayerConfig, index: int) -> Tensor:
        """The table of layer `index`."""
        if form.learned_positions or index in arch.no_rope_layers:
            return self.none
        return self.windowed if window_of(arch, index) else self.all_layers


def make_rotations(arch: ArchSpec, source: DeviceWeights, max_len: int) -> Rotations:
    """cos/sin tables for positions below max_len, on the device."""
    name = "rope_freqs.weight"
    divisors = source.vector(name, arch.rope.dim // 2) if name in source.names() else None
    every = torch.from_numpy(long_table(complete_rope(arch.rope, source.vector), max_len, divisors)).cuda()
    local = arch.rope_local
    half = torch.ones(arch.head_dim // 2)
    return Rotations(
        every,
        every if local is None else torch.from_numpy(cos_sin_table(local, max_len)).cuda(),
        torch.cat((half, 0 * half)).cuda().expand(every.shape[0], -1),
    )


def window_of(arch: ArchSpec, index: int) -> int:
    """Sliding window of layer `index` in tokens; 0: full attention."""
    return 0 if index in arch.full_attention_layers else arch.sliding_window or 0


class CudaLayer:
    """Weights of one layer."""

    def __init__(self, parts: Parts, rotations: Rotations, index: int) -> None:
        arch, form, shares, at = parts.arch, parts.form, parts.shares, f"model.layers.{index}."
        hidden, ffn = arch.hidden, shares.ffn.size
        q, kv = shares.q_heads * arch.head_dim, shares.kv_heads * arch.head_dim
        self.attn_norm, self.attn_post, self.ffn_norm, self.ffn_post = (
            parts.norm(at + name) if name else None for name in form.norms
        )
        self.q_norm = self.k_norm = None
        if arch.qk_norm:
            heads = (arch.num_heads, arch.num_kv_heads)
            self.q_norm, self.k_norm = (
                parts.head_norm(f"{at}self_attn.{side}_norm.weight", num, own)
                for side, num, own in zip("qk", heads, (shares.q, shares.kv), strict=True)
            )
        qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        self.qkv = parts.linear(at + "self_attn.", qkv, hidden, bias=arch.qkv_bias)
        self.o = parts.linear(at + "self_attn.", [("o_proj", hidden)], q, bias=arch.o_bias)
        self.sinks = parts.sinks(at + "self_attn.sinks")
        self.experts: CudaExperts | None = None
        if isinstance(arch.body, MoeBody):
            self.experts = parts.experts(at + FEED_FORWARD[arch.family])
        else:
            gate_up = [(name, ffn) for name in (("gate_proj", "up_proj") if form.has_gate else ("up_proj",))]
            self.gate_up = parts.linear(at + "mlp.", gate_up, hidden, bias=arch.mlp_bias)
            self.down = parts.linear(at + "mlp.", [("down_proj", hidden)], ffn, bias=arch.mlp_bias)
        self.window = window_of(arch, index)
        self.scale = form.scale_of(index)
        self.cos_sin = rotations.of_layer(arch, form, index)

"""The body of Llama 4 (text), GPT-OSS, Mixtral and Qwen3-MoE: one stage on one rank. MoE layers are computed plainly: a
router, then one GEMM per chosen expert. Built by models.load; arch.body holds the differences between families.

Legend: T tokens, H hidden, F width of an expert, E experts, P pairs of a token and one of its K experts (P = T K), sorted by
expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from trireme.errors import ModelError
from trireme.model.bodies import MoeBody
from trireme.model.reader import ArchSpec
from trireme.models.arch.names import FEED_FORWARD, router_name
from trireme.models.arch.rope import cos_sin_table
from trireme.models.cpu import ops
from trireme.models.cpu.embed_head import ColumnShard, EmbedHead, PrefixedSource, RankWeights, identity_table
from trireme.models.cpu.linear import Linear
from trireme.models.cpu.ops_reference import clamped_swiglu, rows_by_chunk, torch_attention
from trireme.models.cpu.tensors import raw_from_tensor
from trireme.models.forward import ExpertGroup, ForwardBatch, Group, KVLayer
from trireme.models.weights.layouts import MXFP4_VALUES_PER_BLOCK, gate_up_rows
from trireme.models.weights.sources import RawMatrix, SafetensorsSource, WeightSource
from trireme.topology.mesh import Mesh, Span, split_evenly

_VISION = ("vision_model.", "multi_modal_projector.")


def seen_names(source: WeightSource, arch: ArchSpec) -> WeightSource:
    """The checkpoint under the names of a plain decoder, without vision weights."""
    assert isinstance(source, SafetensorsSource)
    return PrefixedSource(source, "language_model.", ignored=_VISION if _body(arch).wrapped else ())


def weight_names(arch: ArchSpec) -> Iterator[str]:
    """Every weight of the whole model, all stages."""
    body = _body(arch)
    yield from ("model.embed_tokens.weight", "model.norm.weight")
    if not arch.tie_embeddings:
        yield "lm_head.weight"
    for layer in range(arch.num_layers):
        at = f"model.layers.{layer}."
        yield from (at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
        for name, has_bias in (("q", arch.qkv_bias), ("k", arch.qkv_bias), ("v", arch.qkv_bias), ("o", arch.o_bias)):
            yield f"{at}self_attn.{name}_proj.weight"
            if has_bias:
                yield f"{at}self_attn.{name}_proj.bias"
        if body.sinks:
            yield at + "self_attn.sinks"
        if arch.qk_norm:
            yield from (at + "self_attn.q_norm.weight", at + "self_attn.k_norm.weight")
        yield from _feed_forward_names(body, at + FEED_FORWARD[arch.family], layer)


def _feed_forward_names(body: MoeBody, at: str, layer: int) -> Iterator[str]:
    dense = [at] if layer not in body.moe_layers else [at + ".shared_expert"] if body.shared_expert else []
    for network in dense:
        yield from (f"{network}.{name}_proj.weight" for name in ("gate", "up", "down"))
    if layer in body.moe_layers:
        yield f"{at}.{router_name(body)}.weight"
        yield from (f"{at}.experts.{i}.{name}.weight" for i in range(body.num_experts) for name in body.expert_names)
        for name in () if body.expert_names else ("gate_up_proj", "down_proj"):
            stored = (name + "_blocks", name + "_scales") if body.mxfp4 else (name,)
            yield from (f"{at}.experts.{part}" for part in stored)
            if body.biases:
                yield f"{at}.experts.{name}_bias"
        if body.biases:
            yield at + ".router.bias"


def ignorable_names(arch: ArchSpec) -> list[str]:
    """Names that a file may contain unused."""
    return ["lm_head.weight"] if arch.tie_embeddings else []


def _body(arch: ArchSpec) -> MoeBody:
    assert isinstance(arch.body, MoeBody)
    return arch.body


# ---------------------------------------------------------------- feed-forward networks


class _Dense:
    """SwiGLU network, column-sharded over the ranks."""

    def __init__(self, cut: RankWeights, at: str, ffn: int) -> None:
        hidden = cut.arch.hidden
        own = cut.spans(ffn)[cut.rank]
        self._wide, self._hidden = cut.columns(cut.spans(ffn)), cut.columns(cut.spans(hidden))
        names = (f"{at}.gate_proj.weight", f"{at}.up_proj.weight")
        self._gate_up = cut.packed([cut.source.matrix(name, ffn, hidden).rows(own) for name in names])
        self._down = cut.rows(f"{at}.down_proj", hidden, ffn)
        self.nbytes = self._gate_up.nbytes + self._down.nbytes

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        product = ops.swiglu(_apply(self._gate_up, x))
        return self._hidden.gather(_apply(self._down, self._wide.gather(product, group)), group)


def _apply(linear: Linear, x: Tensor) -> Tensor:
    return linear(x, torch.empty(x.shape[0], linear.n))


class _Experts:
    """A router and its experts; every expert is column-sharded over the ranks. A token's result does not depend on others.

    With `peers` (expert parallel), each engine holds some whole experts. A pair is computed on the engine of its expert and
    added to zeros from the others before a token's results are summed: bit-identical on any number of engines.
    """

    def __init__(self, cut: RankWeights, at: str, peers: ExpertGroup | None = None) -> None:
        arch, self._body = cut.arch, _body(cut.arch)
        body, hidden, ffn = self._body, arch.hidden, arch.ffn
        self._router = cut.packed(
            [cut.source.matrix(f"{at}.{router_name(body)}.weight", body.num_experts, hidden)],
            [cut.vector(at + ".router.bias", body.num_experts)] if body.biases else None,
        )
        self._wide, self._hidden = cut.columns(cut.spans(ffn)), cut.columns(cut.spans(hidden))
        gate, own = cut.spans(ffn)[cut.rank], cut.spans(hidden)[cut.rank]
        self._peers = peers
        self._own = Span(0, body.num_experts)
        if peers is not None:
            self._own = split_evenly(body.num_experts, peers.size, peers.rank)
        if body.expert_names:
            experts = [f"{at}.experts.{i}." for i in range(self._own.start, self._own.stop)]
            self._gate_up, self._down = _separate(cut, experts, body.expert_names, (gate, own))
        else:
            stored = _Stored(cut.source, at + ".experts", body, self._own)
            wide_rows = gate_up_rows(gate, ffn, interleaved=body.glu_limit > 0)
            self._gate_up = stored.linears(cut, "gate_up_proj", 2 * ffn, hidden, wide_rows)
            self._down = stored.linears(cut, "down_proj", hidden, ffn, np.arange(own.start, own.stop))
        self._shared = _Dense(cut, at + ".shared_expert", ffn) if body.shared_expert else None
        self.nbytes = sum(linear.nbytes for linear in (self._router, *self._gate_up, *self._down))
        self.nbytes += self._shared.nbytes if self._shared else 0

    def __call__(self, x: Tensor, group: Group) -> Tensor:
        body, peers, mine = self._body, self._peers, x
        if peers is not None:
            x = peers.spread(x)
        scores, chosen = _apply(self._router, x).topk(body.top_k, dim=-1)
        by_input = body.router == "sigmoid"
        # in float64: torch's vectorized and scalar loops differ in the last bit, and T decides which one runs
        scores = (scores.double().sigmoid() if by_input else scores.double().softmax(-1)).float()
        order = chosen.reshape(-1).argsort(stable=True)
        edges = [0, *chosen.reshape(-1).bincount(minlength=body.num_experts).cumsum(0).tolist()]
        pairs = x[order // body.top_k]
        if by_input:
            pairs = pairs * scores.reshape(-1)[order].unsqueeze(-1)
        product = torch.empty(pairs.shape[0], self._wide.own)
        for expert, start, stop in _runs(edges, self._own):
            product[start:stop] = self._gated(_apply(self._gate_up[expert - self._own.start], pairs[start:stop]))
        product = self._wide.gather(product, group)
        results = torch.zeros(pairs.shape[0], self._hidden.own)
        for expert, start, stop in _runs(edges, self._own):
            self._down[expert - self._own.start](product[start:stop], results[start:stop])
        mixed = torch.empty_like(results).index_copy_(0, order, results).unflatten(0, (-1, body.top_k))
        if peers is not None:
            mixed, scores = peers.collect(mixed, mine.shape[0]), peers.own(scores, mine.shape[0])
        mixed = mixed if by_input else mixed * scores.unsqueeze(-1)
        total = self._hidden.gather(mixed.sum(1), group)
        return total if self._shared is None else total + self._shared(mine, group)

    def _gated(self, gate_up: Tensor) -> Tensor:
        body = self._body
        return clamped_swiglu(gate_up, body.glu_limit, body.glu_alpha) if body.glu_limit else ops.swiglu(gate_up)


def _runs(edges: list[int], own: Span) -> Iterator[tuple[int, int, int]]:
    """(expert, first pair, end) of this engine's experts that at least one token chose."""
    for expert in range(own.start, own.stop):
        if edges[expert] < edges[expert + 1]:
            yield expert, edges[expert], edges[expert + 1]


def _separate(
    cut: RankWeights, experts: list[str], names: tuple[str, ...], rows: tuple[Span, Span]
) -> tuple[list[Linear], list[Linear]]:
    """(gate_up, down) layers of experts whose matrices are stored separately; `rows` are this rank's outputs of each."""
    (gate, up, down), (wide, narrow), hidden, ffn = names, rows, cut.arch.hidden, cut.arch.ffn

    def part(name: str, n: int, k: int, own: Span) -> RawMatrix:
        return cut.source.matrix(name + ".weight", n, k).rows(own)

    return (
        [cut.packed([part(at + name, ffn, hidden, wide) for name in (gate, up)]) for at in experts],
        [cut.packed([part(at + down, hidden, ffn, narrow)]) for at in experts],
    )


class _Stored:
    """The experts of a layer as stored in a file: dense [E, inputs, outputs], or MXFP4 quant blocks per output."""

    def __init__(self, source: PrefixedSource, at: str, body: MoeBody, own: Span) -> None:
        self._source, self._at, self._body, self._own = source, at, body, own

    def linears(self, cut: RankWeights, name: str, n: int, k: int, rows: np.ndarray) -> list[Linear]:
        """One linear layer per own expert, of the outputs `rows` of its n x k matrix."""
        count, bias = self._body.num_experts, None
        pick = torch.from_numpy(rows)
        if self._body.biases:
            stored = self._source.tensor(f"{self._at}.{name}_bias", (count, n))
            bias = stored[self._own.start : self._own.stop].float()[:, pick]
        matrices = self._blocks(name, n, k, rows) if self._body.mxfp4 else self._dense(name, n, k, pick)
        return [cut.packed([matrix], None if bias is None else [bias[i]]) for i, matrix in enumerate(matrices)]

    def _dense(self, name: str, n: int, k: int, rows: Tensor) -> Iterator[RawMatrix]:
        whole = self._source.tensor(f"{self._at}.{name}", (self._body.num_experts, k, n))
        for expert in whole[self._own.start : self._own.stop]:
            yield raw_from_tensor(expert[:, rows].T.contiguous())

    def _blocks(self, name: str, n: int, k: int, rows: np.ndarray) -> Iterator[RawMatrix]:
        """MXFP4 in GGUF's layout: per 32 values a scale byte, then values i and i + 16 in byte i (stored here: 2 i, 2 i + 1)."""
        count, per_row = self._body.num_experts, k // MXFP4_VALUES_PER_BLOCK
        if k % MXFP4_VALUES_PER_BLOCK:
            raise ModelError(f"{self._at}.{name} has rows of {k} values, no multiple of {MXFP4_VALUES_PER_BLOCK}")
        blocks = self._source.tensor(f"{self._at}.{name}_blocks", (count, n, per_row, 16))
        scales = self._source.tensor(f"{self._at}.{name}_scales", (count, n, per_row))
        own = slice(self._own.start, self._own.stop)
        for packed, scale in zip(blocks[own], scales[own], strict=True):
            yield RawMatrix("MXFP4", mxfp4_rows(packed.numpy()[rows], scale.numpy()[rows]), rows.size, k)


def mxfp4_rows(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """GGUF's MXFP4 rows uint8 [n, blocks * 17] from packed [n, blocks, 16] and scales [n, blocks]."""
    values = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:2], 32)
    halves = values[..., :16] | values[..., 16:] << 4
    return np.concatenate((scales[..., None], halves), axis=-1).reshape(packed.shape[0], -1)


# ---------------------------------------------------------------- layers


class _MoeLayer:
    """Weights of one layer."""

    def __init__(self, cut: RankWeights, index: int, peers: ExpertGroup | None = None) -> None:
        arch, body, at = cut.arch, _body(cut.arch), f"model.layers.{index}."
        dim, own = arch.head_dim, cut.heads()[cut.rank]
        self.attn_norm = cut.vector(at + "input_layernorm.weight", arch.hidden)
        self.ffn_norm = cut.vector(at + "post_attention_layernorm.weight", arch.hidden)
        parts = (("q", arch.num_heads, own.q), ("k", arch.num_kv_heads, own.kv), ("v", arch.num_kv_heads, own.kv))
        matrices, biases = [], []
        self.rotates = index not in body.no_rope_layers
        for name, heads, part in parts:
            order = _halves(part, dim, pairs=arch.family == "llama4" and self.rotates and name != "v")
            whole = cut.source.matrix(f"{at}self_attn.{name}_proj.weight", heads * dim, arch.hidden)
            matrices.append(whole._replace(raw=whole.raw[order], n=order.size))
            if arch.qkv_bias:
                biases.append(cut.vector(f"{at}self_attn.{name}_proj.bias", heads * dim)[torch.from_numpy(order)])
        self.qkv = cut.packed(matrices, biases)
        self.o = cut.rows(at + "self_attn.o_proj", arch.hidden, arch.num_heads * dim, bias=arch.o_bias)
        self.window = None if index in arch.full_attention_layers else arch.sliding_window
        self.q_norm = self.k_norm = torch.ones(dim) if body.unit_qk_norm and self.rotates else None
        if arch.qk_norm:
            self.q_norm = cut.vector(at + "self_attn.q_norm.weight", dim)
            self.k_norm = cut.vector(at + "self_attn.k_norm.weight", dim)
        self.sinks: Tensor | None = None
        if body.sinks:
            self.sinks = cut.vector(at + "self_attn.sinks", arch.num_heads)[own.q.start : own.q.stop]
        network = at + FEED_FORWARD[arch.family]
        self.feed_forward: _Experts | _Dense = (
            _Experts(cut, network, peers) if index in body.moe_layers else _Dense(cut, network, body.dense_ffn)
        )

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes + self.feed_forward.nbytes


def _halves(heads: Span, dim: int, *, pairs: bool) -> np.ndarray:
    """Output indices of some heads; with `pairs`, adjacent rotary pairs (0, 1), (2, 3) are reordered to evens, then odds."""
    inside = np.arange(dim).reshape(-1, 2).T.reshape(-1) if pairs else np.arange(dim)
    return (np.arange(heads.start, heads.stop)[:, None] * dim + inside).reshape(-1)


class MoeModel:
    """One stage on one rank; satisfies models.forward.Model."""

    def __init__(
        self,
        arch: ArchSpec,
        mesh: Mesh,
        group: Group,
        source: WeightSource,
        *,
        dense: str | None = None,
        progress: Callable[[str, int, int], None],
        max_len: int | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        assert isinstance(source, PrefixedSource)
        self.arch, self._body, self._group = arch, _body(arch), group
        self.vocab_size, self.head_dim = arch.vocab_size, arch.head_dim
        cut = RankWeights(arch, mesh, source, dense)
        heads = [own.q.size * arch.head_dim for own in cut.heads()]
        stage = mesh.layers(arch.num_layers)
        self.num_kv_layers = stage.size
        self.kv_heads = cut.heads()[cut.rank].kv.size
        self._q, self._hidden = ColumnShard(heads, cut.rank), cut.columns(cut.spans(arch.hidden))
        self._layers = []
        progress("weights", 0, stage.size + 1)
        for done, index in enumerate(range(stage.start, stage.stop), start=1):
            self._layers.append(_MoeLayer(cut, index, experts))
            progress("weights", done, stage.size + 1)
        norm = cut.vector("model.norm.weight", arch.hidden) if mesh.is_last_stage else None
        final = None if norm is None else lambda x: ops.rms_norm(x, norm, arch.norm_eps)
        self._ends = EmbedHead(cut, mesh, group, ("model.embed_tokens", "lm_head"), final)
        positions = max_len or arch.max_position
        self._cos_sin = torch.from_numpy(cos_sin_table(arch.rope, positions))
        self._unrotated = identity_table(positions) if self._body.no_rope_layers else self._cos_sin
        progress("weights", stage.size + 1, stage.size + 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights on this rank."""
        return sum(layer.nbytes for layer in self._layers) + self._ends.nbytes

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Logits [S, V] float32 on the last stage, None elsewhere."""
        hidden, eps = self._ends.begin(batch), self.arch.norm_eps
        chunked = self._chunked(batch, kv)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            attended = self._attention(layer, ops.rms_norm(hidden, layer.attn_norm, eps), batch, chunked, layer_kv)
            part = _apply(layer.o, self._q.gather(attended, self._group))
            hidden += self._hidden.gather(part, self._group)
            hidden += layer.feed_forward(ops.rms_norm(hidden, layer.ffn_norm, eps), self._group)
        return self._ends.finish(hidden, batch.logits_index)

    def dummy_forward(self) -> None:
        """Dummy step: this engine's experts compute for tokens of other engines; it has none itself."""
        for layer in self._layers:
            if isinstance(layer.feed_forward, _Experts):
                layer.feed_forward(torch.empty(0, self.arch.hidden), self._group)

    def _chunked(self, batch: ForwardBatch, kv: list[KVLayer]) -> ForwardBatch | None:
        """The batch that rotary layers attend over; None if the chunk is not a multiple of the KV block."""
        chunk, block_size = self._body.attention_chunk, kv[0].k.shape[-1]
        if chunk % block_size:
            return None
        return rows_by_chunk(batch, chunk, block_size) if chunk else batch

    def _attention(
        self, layer: _MoeLayer, normed: Tensor, batch: ForwardBatch, chunked: ForwardBatch | None, kv: KVLayer
    ) -> Tensor:
        """Attention output [T, Hq * D] of this rank's heads."""
        qkv, scale, eps = _apply(layer.qkv, normed), self.head_dim**-0.5, self.arch.norm_eps
        q_norm, k_norm = layer.q_norm, layer.k_norm
        table, window = self._cos_sin if layer.rotates else self._unrotated, layer.window
        if not layer.rotates and self._body.temperature:
            qkv[:, : self._q.own] *= _temperature(batch.positions, *self._body.temperature)
        seen = chunked if layer.rotates else batch
        if seen is not None and layer.sinks is None:
            return ops.rope_cache_attention(
                qkv, kv, seen, table, scale, window=window, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        q, k, v = _split_heads(qkv, self.kv_heads, self.head_dim)
        ops.rope_and_cache(q, k, v, table, batch.positions, batch.slots, kv, q_norm, k_norm, eps)
        chunk = self._body.attention_chunk if layer.rotates else 0
        return torch_attention(q, kv, batch, scale, window=window, chunk=chunk, sinks=layer.sinks)


def _split_heads(qkv: Tensor, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    heads = qkv.unflatten(1, (-1, dim))
    return heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)


def _temperature(positions: Tensor, strength: float, step: int) -> Tensor:
    """[T, 1]: Llama 4's scale on q, growing with the logarithm of the position (arXiv 2501.19399)."""
    steps = torch.floor((positions.float() + 1.0) / step)
    return (torch.log1p(steps.double()) * strength + 1.0).float().unsqueeze(1)

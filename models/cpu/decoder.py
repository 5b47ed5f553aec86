"""The Llama-like families layer by layer in torch: one stage on one rank, for tensor parallelism (columns are all-gathered
around linear layers) and for features that the native stage (models/cpu/native_stage) lacks.

Built by models.load; run by the worker once per step, from one thread. ArchSpec holds the differences between families.
Nothing here allocates per layer: activations live in buffers that grow to the largest step seen.

Legend: T tokens, H hidden, Q query heads x head_dim of this rank, K KV heads x head_dim, F ffn width of this rank, S, V as
in models.forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from trireme.model.reader import ArchSpec
from trireme.models.arch.layer_config import attention_scale_of
from trireme.models.arch.norms import norm_each_head, whole_columns
from trireme.models.arch.rope import depends_on_length, step_table
from trireme.models.cpu import ops
from trireme.models.cpu.embed_head import ColumnShard
from trireme.models.cpu.embedding import Embedding
from trireme.models.cpu.linear import Linear
from trireme.models.cpu.norm import Norm
from trireme.models.cpu.packed_linear import PackedLinear
from trireme.models.cpu.stage_weights import (
    ColumnShares,
    LayerWeights,
    NormWeights,
    StageWeights,
    sizes_of,
    soft_capped,
)
from trireme.models.forward import ForwardBatch, Group, KVLayer
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import WeightSource
from trireme.topology.mesh import Mesh, Span

_GATES = {"silu": ops.swiglu, "gelu_tanh": ops.geglu}


def _tensor(vector: Floats | None) -> Tensor | None:
    return None if vector is None else torch.from_numpy(vector)


class _DecoderLayer:
    """The weights of one layer as tensors."""

    def __init__(self, weights: LayerWeights, norm: Callable[[NormWeights | None], Norm | None]) -> None:
        self.attn_norm, self.attn_post = norm(weights.attn_norm), norm(weights.attn_post)
        self.ffn_norm, self.ffn_post = norm(weights.ffn_norm), norm(weights.ffn_post)
        self.q_norm, self.k_norm = _tensor(weights.q_norm), _tensor(weights.k_norm)
        self.qkv, self.o = Linear(weights.qkv), Linear(weights.o)
        self.gate_up, self.down = Linear(weights.gate_up), Linear(weights.down)
        self.window, self.rotates = weights.window, weights.rotates
        self.cos_sin = torch.from_numpy(weights.cos_sin)


class _Activations:
    """Buffers of a step's activations: hidden states, normed, qkv, attended, gate and up, their product. They grow to the largest
    step seen."""

    def __init__(self, arch: ArchSpec, shares: ColumnShares, rank: int) -> None:
        q, kv, ffn = shares.q[rank].size, shares.kv[rank].size, shares.ffn[rank].size
        self._widths = (arch.hidden, arch.hidden, q + 2 * kv, q, 2 * ffn, ffn)
        self._buffers = self._allocate(0)

    def views(self, num_tokens: int) -> list[Tensor]:
        """All buffers, sliced to the step."""
        if self._buffers[0].shape[0] < num_tokens:
            self._buffers = self._allocate(max(num_tokens, 2 * self._buffers[0].shape[0]))
        return [buffer[:num_tokens] for buffer in self._buffers]

    def _allocate(self, num_tokens: int) -> list[Tensor]:
        return [torch.empty(num_tokens, width) for width in self._widths]


class _Head:
    """Final norm and output head of the last stage; every rank has some of the vocabulary."""

    def __init__(self, arch: ArchSpec, matrix: PackedLinear, norm: Norm | None, vocab: ColumnShard) -> None:
        assert norm is not None
        self._arch = arch
        self._linear = Linear(matrix)
        self._norm = norm
        self._vocab = vocab

    def logits(self, hidden: Tensor, index: Tensor, group: Group) -> Tensor:
        """Logits [S, V] of the tokens `index`, on every rank."""
        num_tokens = index.shape[0]
        if num_tokens == 0:
            return torch.empty(0, self._arch.vocab_size)
        tokens = hidden if num_tokens == hidden.shape[0] else hidden.index_select(0, index)
        logits = torch.empty(num_tokens, self._linear.n)
        self._linear(self._norm(tokens), logits)
        soft_capped(logits.numpy(), self._arch)
        return self._vocab.gather(logits, group)


class TorchDecoder:
    """One stage on one rank; satisfies models.forward.TensorModel. `weight_bytes` counts packed matrices and tables."""

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
    ) -> None:
        self.arch = arch
        self.vocab_size = arch.vocab_size
        self.head_dim = arch.head_dim
        self._rank = rank = mesh.tp_rank
        self._group = group
        weights = self.weights = StageWeights(arch, mesh, source, dense=dense, progress=progress, max_len=max_len)
        shares = self._shares = weights.shares
        self.num_kv_layers = len(weights.layers)
        self.kv_heads = shares.kv[rank].size // arch.head_dim
        self._layers = [_DecoderLayer(layer, self._norm_of) for layer in weights.layers]
        self._embedding = self._embedding_of(weights.embedding, shares.vocab[rank])
        vocab, norm = ColumnShard(sizes_of(shares.vocab), rank), self._norm_of(weights.norm)
        self._head = None if weights.head is None else _Head(arch, weights.head, norm, vocab)
        self._q_columns = ColumnShard(sizes_of(shares.q), rank)
        self._ffn_columns = ColumnShard(sizes_of(shares.ffn), rank)
        self._hidden_columns = ColumnShard(sizes_of(shares.hidden), rank)
        self._activations = _Activations(arch, shares, rank)
        self._gate = _GATES[arch.activation]

    def _norm_of(self, weights: NormWeights | None) -> Norm | None:
        if weights is None:
            return None
        weight, bias = torch.from_numpy(weights.weight), _tensor(weights.bias)
        return Norm(weight, bias, self.arch.norm_eps, is_rms=self.arch.norm_kind == "rms")

    def _embedding_of(self, matrix: PackedLinear | None, rows: Span) -> Embedding | None:
        return None if matrix is None else Embedding(matrix.weights[0], rows, self._group)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights and tables on this rank."""
        return self.weights.nbytes

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Logits [S, V] float32 on the last stage, None elsewhere. Never returns views of internal buffers."""
        num_tokens = batch.token_ids.shape[0]
        buffers = self._activations.views(num_tokens)
        hidden = buffers[0]
        if self._embedding is not None:
            self._embedding(batch.token_ids, hidden)
            if self.arch.embed_scale != 1.0:
                hidden *= self.arch.embed_scale
        else:
            hidden.copy_(self._group.recv_prev((num_tokens, self.arch.hidden), torch.float32))
        rope = self.weights.rope
        self._run_layers(batch, kv, buffers, _tensor(step_table(rope, batch)) if depends_on_length(rope) else None)
        if self._head is None:
            self._group.send_next(hidden)
            return None
        return self._head.logits(hidden, batch.logits_index, self._group)

    def _run_layers(
        self, batch: ForwardBatch, kv: list[KVLayer], buffers: list[Tensor], table: Tensor | None = None
    ) -> None:
        """Runs all layers. Ranks all-gather columns before and after each linear layer that needs all inputs. `table`
        holds the step's cosines and sines if they depend on more than the position."""
        hidden, normed, _qkv, _attended, gate_up, product = buffers
        is_parallel = self.arch.norm_placement == "parallel"
        if table is not None:
            batch = replace(batch, positions=torch.arange(hidden.shape[0], dtype=torch.int32))
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x = hidden if layer.attn_norm is None else layer.attn_norm(hidden, normed)
            branch = self._attend(layer, x, layer_kv, batch, buffers, table)
            if not is_parallel:
                self._join(hidden, branch, layer.attn_post)
                x = hidden if layer.ffn_norm is None else layer.ffn_norm(hidden, normed)
            layer.gate_up(x, gate_up)
            self._gate(gate_up, product)
            if is_parallel:
                self._join(hidden, branch, None)
            self._join(hidden, self._project(layer.down, product, self._ffn_columns), layer.ffn_post)

    def _attend(
        self,
        layer: _DecoderLayer,
        x: Tensor,
        layer_kv: KVLayer,
        batch: ForwardBatch,
        buffers: list[Tensor],
        table: Tensor | None,
    ) -> Tensor:
        """The attention branch of x [T, H], before its post-norm."""
        arch, (qkv, attended) = self.arch, buffers[2:4]
        layer.qkv(x, qkv)
        in_op = (layer.q_norm, layer.k_norm) if arch.qk_norm_kind == "head" else (None, None)
        if arch.qk_norm and arch.qk_norm_kind != "head":
            self._norm_qk(layer, qkv)
        ops.rope_cache_attention(
            qkv,
            layer_kv,
            batch,
            table if table is not None and layer.rotates else layer.cos_sin,
            attention_scale_of(arch),
            window=layer.window,
            softcap=arch.attn_softcap,
            q_norm=in_op[0],
            k_norm=in_op[1],
            eps=arch.norm_eps,
            out=attended,
        )
        return self._project(layer.o, attended, self._q_columns)

    def _norm_qk(self, layer: _DecoderLayer, qkv: Tensor) -> None:
        """q and k norms other than one weight vector shared by all heads, in place."""
        rank, eps, shares = self._rank, self.arch.norm_eps, self._shares
        q_width, kv_width = shares.q[rank].size, shares.kv[rank].size
        q, k, _v = qkv.split([q_width, kv_width, kv_width], dim=1)
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        for part, weight, spans in ((q, layer.q_norm, shares.q), (k, layer.k_norm, shares.kv)):
            if self.arch.qk_norm_kind == "heads":
                norm_each_head(part.unflatten(1, (-1, self.head_dim)), weight, eps)
            elif self._group.size == 1:
                ops.rms_norm(part, weight, eps, part)
            else:
                whole = whole_columns(part, spans, self._group)
                part.copy_(ops.rms_norm(whole, weight, eps)[:, spans[rank].start : spans[rank].stop])

    def _project(self, last: Linear, x: Tensor, columns: ColumnShard) -> Tensor:
        """All output columns [T, H] of a linear layer over x, whose `columns` are sharded."""
        part = torch.empty(x.shape[0], self._hidden_columns.own)
        return self._hidden_columns.gather(last(columns.gather(x, self._group), part), self._group)

    def _join(self, hidden: Tensor, branch: Tensor, post: Norm | None) -> None:
        """Adds a branch to the residual stream, after the family's post-norm and scale."""
        if post is not None:
            branch = post(branch)
        if self.arch.residual_scale != 1.0:
            branch = branch * self.arch.residual_scale
        hidden += branch

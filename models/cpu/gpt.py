"""The body of GPT-2, GPT-NeoX and Falcon: one stage on one rank. Layer norms with biases, a fused qkv linear layer, a
feed-forward network without a gate. Built by models.load; NAMES and arch.body hold the differences between families.

Legend: T tokens, H hidden, G groups of query heads (KV heads), D head_dim, F ffn width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.arch.gpt_names import NAMES, Names, gpt_body, norm_names, qkv_heads
from trireme.models.arch.rope import cos_sin_table
from trireme.models.cpu import ops
from trireme.models.cpu.embed_head import EmbedHead, PrefixedSource, RankWeights, dense_tensor, identity_table
from trireme.models.cpu.linear import Linear
from trireme.models.cpu.ops_reference import gelu, layer_norm
from trireme.models.forward import ForwardBatch, Group, KVLayer
from trireme.models.weights.sources import RawMatrix, SafetensorsSource, WeightSource
from trireme.topology.mesh import Mesh

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "gelu_tanh": lambda x: gelu(x, tanh=True),
    "relu": torch.relu,
}


def seen_names(source: WeightSource, arch: ArchSpec) -> WeightSource:
    """The checkpoint under the names this module uses, without the family's prefix."""
    assert isinstance(source, SafetensorsSource)
    names = NAMES[arch.family]
    return PrefixedSource(source, names.prefix, renamed=names.renamed)


def weight_names(arch: ArchSpec) -> Iterator[str]:
    """Every weight of the whole model, all stages."""
    names, body = NAMES[arch.family], gpt_body(arch)
    yield names.embed + ".weight"
    yield from (names.norm + ".weight", names.norm + ".bias")
    if body.learned_positions:
        yield "wpe.weight"
    if not arch.tie_embeddings:
        yield names.head + ".weight"
    biased = {names.qkv: arch.qkv_bias, names.o: arch.o_bias, names.up: arch.mlp_bias, names.down: arch.mlp_bias}
    for layer in range(arch.num_layers):
        at = f"{names.layer}.{layer}."
        for norm in norm_names(arch):
            yield from (f"{at}{norm}.weight", f"{at}{norm}.bias")
        for name, has_bias in biased.items():
            yield f"{at}{name}.weight"
            if has_bias:
                yield f"{at}{name}.bias"


def ignorable_names(arch: ArchSpec) -> list[str]:
    """Names that a file may contain unused: masks and frequencies of old checkpoints, and a tied head."""
    names = NAMES[arch.family]
    ignorable = [f"{names.layer}.{layer}.{name}" for layer in range(arch.num_layers) for name in names.buffers]
    return [*ignorable, names.head + ".weight"] if arch.tie_embeddings else ignorable


class _Norm:
    """A layer norm with its weights."""

    def __init__(self, cut: RankWeights, name: str, arch: ArchSpec) -> None:
        self._weight = cut.vector(name + ".weight", arch.hidden)
        self._bias = cut.vector(name + ".bias", arch.hidden)
        self._eps = arch.norm_eps

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self._weight, self._bias, self._eps)


class _GptLayer:
    """Weights of one layer."""

    def __init__(self, cut: RankWeights, index: int) -> None:
        arch, names = cut.arch, NAMES[cut.arch.family]
        body, at = gpt_body(arch), f"{names.layer}.{index}."
        self.norms = [_Norm(cut, at + name, arch) for name in norm_names(arch)]
        self.qkv = _fused_qkv(cut, at + names.qkv, names)
        q_rows = arch.num_heads * arch.head_dim
        self.o = _rows(cut, at + names.o, arch.hidden, q_rows, names, bias=arch.o_bias)
        self.up = _rows(cut, at + names.up, arch.ffn, arch.hidden, names, bias=arch.mlp_bias)
        self.down = _rows(cut, at + names.down, arch.hidden, arch.ffn, names, bias=arch.mlp_bias)
        scale = body.attention_scale or arch.head_dim**-0.5
        self.scale = scale / (index + 1) if body.scale_by_layer else scale

    @property
    def nbytes(self) -> int:
        return self.qkv.nbytes + self.o.nbytes + self.up.nbytes + self.down.nbytes


def _matrix(cut: RankWeights, name: str, n: int, k: int, names: Names) -> RawMatrix:
    if names.inputs_first:
        return cut.source.matrix(name + ".weight", k, n).transposed()
    return cut.source.matrix(name + ".weight", n, k)


def _rows(cut: RankWeights, name: str, n: int, k: int, names: Names, *, bias: bool) -> Linear:
    if not names.inputs_first:
        return cut.rows(name, n, k, bias=bias)
    own = cut.spans(n)[cut.rank]
    biases = [cut.vector(name + ".bias", n)[own.start : own.stop]] if bias else None
    return cut.packed([_matrix(cut, name, n, k, names).rows(own)], biases)


def _fused_qkv(cut: RankWeights, name: str, names: Names) -> Linear:
    """A linear layer over this rank's q, k and v outputs, in that order, sliced from the fused matrix."""
    arch = cut.arch
    heads = arch.num_heads + 2 * arch.num_kv_heads
    whole = _matrix(cut, name, heads * arch.head_dim, arch.hidden, names)
    order = qkv_heads(arch.num_heads, arch.num_kv_heads, cut.heads()[cut.rank], grouped=names.grouped)
    rows = (order[:, None] * arch.head_dim + np.arange(arch.head_dim)).reshape(-1)
    biases = [cut.vector(name + ".bias", heads * arch.head_dim)[torch.from_numpy(rows)]] if arch.qkv_bias else None
    return cut.packed([whole._replace(raw=whole.raw[rows], n=rows.size)], biases)


class GptModel:
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
    ) -> None:
        assert isinstance(source, PrefixedSource)
        body, names = gpt_body(arch), NAMES[arch.family]
        positions = max_len or arch.max_position
        if body.learned_positions and positions > body.learned_positions:
            raise ModelError(f"{source.path} has {body.learned_positions} positions; {positions} are asked for")
        self.vocab_size, self.head_dim = arch.vocab_size, arch.head_dim
        self._group = group
        cut = RankWeights(arch, mesh, source, dense)
        heads = cut.heads()
        stage = mesh.layers(arch.num_layers)
        self.num_kv_layers = stage.size
        self.kv_heads = heads[cut.rank].kv.size
        self._q, self._ffn, self._hidden = (
            cut.columns(
                [own.q._replace(start=own.q.start * self.head_dim, stop=own.q.stop * self.head_dim) for own in heads]
            ),
            cut.columns(cut.spans(arch.ffn)),
            cut.columns(cut.spans(arch.hidden)),
        )
        self._activate, self._parallel = _ACTIVATIONS[body.activation], body.parallel
        self._layers = []
        progress("weights", 0, stage.size + 1)
        for done, index in enumerate(range(stage.start, stage.stop), start=1):
            self._layers.append(_GptLayer(cut, index))
            progress("weights", done, stage.size + 1)
        norm = _Norm(cut, names.norm, arch) if mesh.is_last_stage else None
        self._ends = EmbedHead(cut, mesh, group, (names.embed, names.head), norm)
        self._positions: Tensor | None = None
        if body.learned_positions and mesh.is_first_stage:
            rows = source.matrix("wpe.weight", body.learned_positions, arch.hidden)
            self._positions = dense_tensor(rows).float()
        self._cos_sin = (
            identity_table(positions)
            if body.learned_positions
            else torch.from_numpy(cos_sin_table(arch.rope, positions))
        )
        progress("weights", stage.size + 1, stage.size + 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights on this rank."""
        return sum(layer.nbytes for layer in self._layers) + self._ends.nbytes

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Logits [S, V] float32 on the last stage, None elsewhere."""
        hidden = self._ends.begin(batch)
        if self._positions is not None:
            hidden += self._positions[batch.positions]
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            normed = layer.norms[0](hidden)
            attended = self._attention(layer, normed, batch, layer_kv)
            if self._parallel:
                hidden += self._feed_forward(layer, layer.norms[-1](hidden) if len(layer.norms) > 1 else normed)
                hidden += attended
            else:
                hidden += attended
                hidden += self._feed_forward(layer, layer.norms[-1](hidden))
        return self._ends.finish(hidden, batch.logits_index)

    def _attention(self, layer: _GptLayer, normed: Tensor, batch: ForwardBatch, kv: KVLayer) -> Tensor:
        qkv = layer.qkv(normed, torch.empty(normed.shape[0], layer.qkv.n))
        attended = ops.rope_cache_attention(qkv, kv, batch, self._cos_sin, layer.scale)
        return self._product(layer.o, self._q.gather(attended, self._group))

    def _feed_forward(self, layer: _GptLayer, normed: Tensor) -> Tensor:
        wide = self._activate(layer.up(normed, torch.empty(normed.shape[0], layer.up.n)))
        return self._product(layer.down, self._ffn.gather(wide, self._group))

    def _product(self, linear: Linear, x: Tensor) -> Tensor:
        """Applies a column-sharded linear layer and all-gathers its output [T, H]."""
        return self._hidden.gather(linear(x, torch.empty(x.shape[0], linear.n)), self._group)

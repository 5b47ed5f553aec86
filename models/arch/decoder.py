"""The decoder body of the Llama family (Llama, Mistral, Qwen2, Qwen3): one stage of it on one rank.

Built by models.load; run by the worker once per step, from one thread. What differs between families is in ArchSpec.
Nothing here allocates per layer: activations live in buffers that grow to the largest step seen.

Legend: T tokens, H hidden, Q query heads x head_dim of this rank, K KV heads x head_dim, F ffn width of this rank, S, V as
in models.forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from models import ops
from models.forward import ForwardBatch, Group, KVLayer
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.rope import cos_sin_table
from models.native import load_native
from models.weights import WeightSource
from trireme.arch import ArchSpec
from trireme.mesh import Mesh, Span, split_evenly, split_heads


def weight_names(arch: ArchSpec) -> Iterator[str]:
    """Every weight of the whole model, all stages, by Hugging Face name."""
    yield "model.embed_tokens.weight"
    yield "model.norm.weight"
    if not arch.tie_embeddings:
        yield "lm_head.weight"
    biased = {"self_attn.q_proj": arch.qkv_bias, "self_attn.k_proj": arch.qkv_bias, "self_attn.v_proj": arch.qkv_bias}
    biased |= {"self_attn.o_proj": arch.o_bias}
    biased |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), arch.mlp_bias)
    for layer in range(arch.num_layers):
        at = f"model.layers.{layer}."
        yield at + "input_layernorm.weight"
        yield at + "post_attention_layernorm.weight"
        for name, has_bias in biased.items():
            yield f"{at}{name}.weight"
            if has_bias:
                yield f"{at}{name}.bias"
        if arch.qk_norm:
            yield at + "self_attn.q_norm.weight"
            yield at + "self_attn.k_norm.weight"


def ignorable_names(arch: ArchSpec) -> list[str]:
    """Names that may be in a file without being used: frequencies that can be derived, and a head that is tied."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(arch.num_layers)]
    names += ["model.rotary_emb.inv_freq", "rope_freqs.weight"]
    return [*names, "lm_head.weight"] if arch.tie_embeddings else names


class _Builder:
    """Cuts this rank's share out of the source, layer by layer. Every matrix is split by output rows, never along the
    inputs: each output is then one sum in one order whatever the number of ranks, and TP changes no bit."""

    def __init__(self, arch: ArchSpec, mesh: Mesh, source: WeightSource, dense: str | None) -> None:
        self.arch = arch
        self.source = source
        self.vector = source.vector
        self._dense = dense
        self.q: list[Span] = []  # per rank, in columns
        self.kv: list[Span] = []
        for rank in range(mesh.tp):
            heads = split_heads(arch.num_heads, arch.num_kv_heads, mesh.tp, rank)
            self.q.append(_scaled(heads.q, arch.head_dim))
            self.kv.append(_scaled(heads.kv, arch.head_dim))
        self.ffn = _split(arch.ffn, mesh.tp)
        self.hidden = _split(arch.hidden, mesh.tp)
        self.vocab = _split(arch.vocab_size, mesh.tp)

    def linear(self, at: str, parts: list[tuple[str, int, Span]], k: int, *, bias: bool) -> Linear:
        """Matrices with k inputs, one under the other; `parts` are (name, rows of the whole, rows of this rank)."""
        matrices = [self.source.matrix(f"{at}{name}.weight", n, k).rows(rows) for name, n, rows in parts]
        biases = [self.vector(f"{at}{name}.bias", n)[rows.start : rows.stop] for name, n, rows in parts if bias]
        return Linear([matrix.computable(self._dense) for matrix in matrices], biases)


def _split(total: int, parts: int) -> list[Span]:
    """Spans of all ranks, in whole tiles of 16 where possible."""
    unit = 16 if total % 16 == 0 and total // 16 >= parts else 1
    return [split_evenly(total, parts, part, unit=unit) for part in range(parts)]


def _scaled(span: Span, factor: int) -> Span:
    return Span(span.start * factor, span.stop * factor)


def _sizes(spans: list[Span]) -> list[int]:
    return [span.size for span in spans]


class _Layer:
    """Weights of one layer; the computation is in Decoder and FusedStage."""

    __slots__ = (
        "attn_norm",
        "down",
        "ffn_norm",
        "gate_up",
        "k_norm",
        "o",
        "q_norm",
        "qkv",
        "window",
    )

    def __init__(self, build: _Builder, index: int, rank: int) -> None:
        arch, at = build.arch, f"model.layers.{index}."
        dim, hidden, ffn = arch.head_dim, arch.hidden, arch.ffn
        q_rows, kv_rows = arch.num_heads * dim, arch.num_kv_heads * dim
        q, kv, ffn_part, hidden_part = build.q[rank], build.kv[rank], build.ffn[rank], build.hidden[rank]
        self.attn_norm = build.vector(at + "input_layernorm.weight", hidden)
        self.ffn_norm = build.vector(at + "post_attention_layernorm.weight", hidden)
        self.q_norm = build.vector(at + "self_attn.q_norm.weight", dim) if arch.qk_norm else None
        self.k_norm = build.vector(at + "self_attn.k_norm.weight", dim) if arch.qk_norm else None
        qkv = [("q_proj", q_rows, q), ("k_proj", kv_rows, kv), ("v_proj", kv_rows, kv)]
        self.qkv = build.linear(at + "self_attn.", qkv, hidden, bias=arch.qkv_bias)
        self.o = build.linear(at + "self_attn.", [("o_proj", hidden, hidden_part)], q_rows, bias=arch.o_bias)
        gate_up = [("gate_proj", ffn, ffn_part), ("up_proj", ffn, ffn_part)]
        self.gate_up = build.linear(at + "mlp.", gate_up, hidden, bias=arch.mlp_bias)
        self.down = build.linear(at + "mlp.", [("down_proj", hidden, hidden_part)], ffn, bias=arch.mlp_bias)
        self.window = None if index in arch.full_attention_layers else arch.sliding_window

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.o, self.gate_up, self.down))


class FusedStage:
    """All layers in one native call, for a rank that needs no sums with others; same bits as Decoder._run_layers."""

    def __init__(self, layers: list[_Layer], arch: ArchSpec, widths: tuple[int, int, int], cos_sin: Tensor) -> None:
        """`widths` are the columns of q, of k, and of the ffn on this rank."""
        q, kv, ffn = widths
        dim, rot = arch.head_dim, cos_sin.shape[1]
        sizes = (arch.hidden, q // dim, kv // dim, dim, ffn, rot)
        self._owners = (layers, cos_sin)  # native code points into them
        self._stage = load_native().DecoderStage(sizes, arch.norm_eps, arch.head_dim**-0.5, cos_sin.data_ptr())
        self._kv: list[KVLayer] | None = None
        for layer in layers:
            norms = (layer.attn_norm, layer.ffn_norm, layer.q_norm, layer.k_norm)
            self._stage.add_layer(
                [0 if norm is None else norm.data_ptr() for norm in norms],
                layer.window or 0,
                [part.native_pieces() for part in (layer.qkv, layer.o, layer.gate_up, layer.down)],
            )

    def run(self, batch: ForwardBatch, kv: list[KVLayer], buffers: list[Tensor]) -> None:
        """One step; `buffers` are those of Decoder._views, dense. Releases the interpreter lock throughout."""
        if kv is not self._kv:
            self._bind_kv(kv)
        table = batch.block_table
        inputs = (batch.positions, batch.slots, batch.query_start, batch.context_len, table)
        self._stage.run(
            batch.token_ids.shape[0],
            table.shape[0],
            [tensor.data_ptr() for tensor in inputs],
            table.stride(0),
            [buffer.data_ptr() for buffer in buffers],
        )

    def _bind_kv(self, kv: list[KVLayer]) -> None:
        """Remembers the caches; a worker passes the same list in every step."""
        first = kv[0].k
        caches = [(layer.k.data_ptr(), layer.v.data_ptr()) for layer in kv]
        self._stage.bind_kv(ops.KV_CODES[first.dtype], first.shape[3], caches)
        self._kv = kv


class Decoder:
    """One stage on one rank; satisfies models.forward.Model. `weight_bytes` counts packed matrices and tables."""

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
        self._mesh = mesh
        self._group = group
        build = _Builder(arch, mesh, source, dense)
        stage = mesh.layers(arch.num_layers)
        rank = mesh.tp_rank
        self.num_kv_layers = stage.size
        self.kv_heads = build.kv[rank].size // arch.head_dim
        total = stage.size + (1 if mesh.is_first_stage or mesh.is_last_stage else 0)
        progress("weights", 0, total)
        self._layers: list[_Layer] = []
        for done, index in enumerate(range(stage.start, stage.stop), start=1):
            self._layers.append(_Layer(build, index, rank))
            progress("weights", done, total)
        self._build_ends(build)
        progress("weights", total, total)
        divisors = (
            build.vector("rope_freqs.weight", arch.rope.dim // 2) if "rope_freqs.weight" in source.names() else None
        )
        positions = max_len or arch.max_position
        self._cos_sin = cos_sin_table(arch.rope, positions, divisors)
        self._q_sizes, self._ffn_sizes, self._hidden_sizes = _sizes(build.q), _sizes(build.ffn), _sizes(build.hidden)
        q, kv, ffn = build.q[rank].size, build.kv[rank].size, build.ffn[rank].size
        self._widths = (arch.hidden, arch.hidden, q + 2 * kv, q, 2 * ffn, ffn)
        self._buffers = self._allocate(0)
        self._fused = FusedStage(self._layers, arch, (q, kv, ffn), self._cos_sin)

    def _build_ends(self, build: _Builder) -> None:
        """Embedding on the first stage, norm and head on the last; one matrix serves both where they are tied."""
        arch, mesh = self.arch, self._mesh
        rows = build.vocab[mesh.tp_rank]
        self._head: Linear | None = None
        self._embedding: Embedding | None = None
        if mesh.is_last_stage:
            name = "model.embed_tokens" if arch.tie_embeddings else "lm_head"
            self._head = build.linear("", [(name, arch.vocab_size, rows)], arch.hidden, bias=False)
            self._norm = build.vector("model.norm.weight", arch.hidden)
            self._vocab_sizes = _sizes(build.vocab)
        if mesh.is_first_stage:
            shared = self._head if arch.tie_embeddings else None
            own = [("model.embed_tokens", arch.vocab_size, rows)]
            matrix = shared or build.linear("", own, arch.hidden, bias=False)
            self._embedding = Embedding(matrix.weights[0], rows, self._group)

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights and tables on this rank."""
        head = 0 if self._head is None else self._head.nbytes
        shares = self._head is not None and self.arch.tie_embeddings
        embedding = 0 if self._embedding is None or shares else self._embedding.nbytes
        return sum(layer.nbytes for layer in self._layers) + head + embedding + self._cos_sin.nbytes

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Logits [S, V] float32 on the last stage, None elsewhere. Views of internal buffers are never returned."""
        num_tokens = batch.token_ids.shape[0]
        buffers = self._views(num_tokens)
        hidden = buffers[0]
        if self._embedding is not None:
            self._embedding(batch.token_ids, hidden)
        else:
            hidden.copy_(self._group.recv_prev((num_tokens, self.arch.hidden), torch.float32))
        if self._group.size == 1:
            self._fused.run(batch, kv, buffers)
        else:
            self._run_layers(batch, kv, buffers)
        if self._head is None:
            self._group.send_next(hidden)
            return None
        return self._logits(hidden, batch.logits_index)

    def _run_layers(self, batch: ForwardBatch, kv: list[KVLayer], buffers: list[Tensor]) -> None:
        """Layer by layer. Ranks put their columns together before and after each product that needs all inputs."""
        hidden, normed, qkv, attended, gate_up, product = buffers
        eps, cos_sin, scale, gather = (
            self.arch.norm_eps,
            self._cos_sin,
            self.arch.head_dim**-0.5,
            self._group.all_gather,
        )
        part = torch.empty(hidden.shape[0], self._hidden_sizes[self._mesh.tp_rank])
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            ops.rms_norm(hidden, layer.attn_norm, eps, normed)
            layer.qkv(normed, qkv)
            ops.rope_cache_attention(
                qkv,
                layer_kv,
                batch,
                cos_sin,
                scale,
                window=layer.window,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                out=attended,
            )
            layer.o(gather(attended, self._q_sizes), part)
            ops.add_rms_norm(gather(part, self._hidden_sizes), hidden, layer.ffn_norm, eps, normed)
            layer.gate_up(normed, gate_up)
            ops.swiglu(gate_up, product)
            layer.down(gather(product, self._ffn_sizes), part)
            hidden += gather(part, self._hidden_sizes)

    def _logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        assert self._head is not None
        num_rows = index.shape[0]
        if num_rows == 0:
            return torch.empty(0, self.vocab_size)
        rows = hidden if num_rows == hidden.shape[0] else hidden.index_select(0, index)
        logits = torch.empty(num_rows, self._head.n)
        self._head(ops.rms_norm(rows, self._norm, self.arch.norm_eps), logits)
        return logits if self._group.size == 1 else self._group.all_gather(logits, self._vocab_sizes)

    def _views(self, num_tokens: int) -> list[Tensor]:
        if self._buffers[0].shape[0] < num_tokens:
            self._buffers = self._allocate(max(num_tokens, 2 * self._buffers[0].shape[0]))
        return [buffer[:num_tokens] for buffer in self._buffers]

    def _allocate(self, num_tokens: int) -> list[Tensor]:
        return [torch.empty(num_tokens, width) for width in self._widths]

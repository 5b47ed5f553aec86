"""The decoder body of the Llama-like families (see models/registry): one stage of it on one rank.

Built by models.load; run by the worker once per step, from one thread. What differs between families is in ArchSpec.
Nothing here allocates per layer: activations live in buffers that grow to the largest step seen.

Legend: T tokens, H hidden, Q query heads x head_dim of this rank, K KV heads x head_dim, F ffn width of this rank, S, V as
in models.forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from models import ops
from models.forward import ForwardBatch, Group, KVLayer
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.layers.norm import Norm, norm_each_head
from models.layers.rope import cos_sin_table, depends_on_length, step_table
from models.native import load_native
from models.weights import WeightSource, raw_from_tensor
from trireme.arch import ArchSpec, RopeSpec
from trireme.arch_spec import NormPlacement
from trireme.mesh import Mesh, Span, split_evenly, split_heads


class NormNames(NamedTuple):
    """Norms of a layer: before attention, after it, before the feed-forward network, after it; "" where there is none."""

    attn_norm: str = ""
    attn_post: str = ""
    ffn_norm: str = ""
    ffn_post: str = ""


NORM_NAMES: dict[NormPlacement, NormNames] = {
    "pre": NormNames("input_layernorm", "", "post_attention_layernorm", ""),
    "post": NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "parallel": NormNames("input_layernorm"),
}


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


# What GGUF files of longrope models hold in the place of settings.
_LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


def ignorable_names(arch: ArchSpec) -> list[str]:
    """Names that may be in a file without being used: frequencies that can be derived, and a head that is tied."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(arch.num_layers)]
    names += ["model.rotary_emb.inv_freq", "rope_freqs.weight", *_LONGROPE]
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

    def linear(self, at: str, parts: list[tuple[str, int, Span]], k: int, *, bias: bool, unit: bool = False) -> Linear:
        """Matrices with k inputs, one under the other; `parts` are (name, rows of the whole, rows of this rank). `unit`
        brings every row to length 1."""
        matrices = [self.source.matrix(f"{at}{name}.weight", n, k).rows(rows) for name, n, rows in parts]
        if unit:
            matrices = [raw_from_tensor(torch.nn.functional.normalize(matrix.as_float32())) for matrix in matrices]
        biases = [self.vector(f"{at}{name}.bias", n)[rows.start : rows.stop] for name, n, rows in parts if bias]
        return Linear([matrix.computable(self._dense) for matrix in matrices], biases)

    def norm(self, name: str) -> Norm | None:
        """The norm of that name, None for an empty one."""
        if not name:
            return None
        arch = self.arch
        weight = self._norm_weight(name, arch.hidden)
        bias = self.vector(name + ".bias", arch.hidden) if arch.norm_bias else None
        return Norm(weight, bias, arch.norm_eps, is_rms=arch.norm_kind == "rms")

    def qk_norm(self, name: str, heads: Span, total: int) -> Tensor | None:
        """Norm weights of q or k; `heads` are the columns of this rank out of `total`."""
        arch = self.arch
        if not arch.qk_norm:
            return None
        if arch.qk_norm_kind == "head":
            return self._norm_weight(name, arch.head_dim)
        whole = self._norm_weight(name, total)
        return whole if arch.qk_norm_kind == "wide" else whole[heads.start : heads.stop].contiguous()

    def _norm_weight(self, name: str, size: int) -> Tensor:
        weight = self.vector(name + ".weight", size)
        return weight + self.arch.norm_offset if self.arch.norm_offset else weight


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

    def __init__(self, build: _Builder, index: int, rank: int) -> None:
        arch, at = build.arch, f"model.layers.{index}."
        dim, hidden, ffn = arch.head_dim, arch.hidden, arch.ffn
        q_rows, kv_rows = arch.num_heads * dim, arch.num_kv_heads * dim
        q, kv, ffn_part, hidden_part = build.q[rank], build.kv[rank], build.ffn[rank], build.hidden[rank]
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
        self.cos_sin = torch.empty(0, 0)  # set by Decoder, which shares tables

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.o, self.gate_up, self.down))


_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}
_GATES = {"silu": ops.swiglu, "gelu_tanh": ops.geglu}


def attention_scale_of(arch: ArchSpec) -> float:
    """Factor of attention scores."""
    return arch.attn_scale or arch.head_dim**-0.5


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class FusedStage:
    """All layers in one native call, for a rank that needs no sums with others; same bits as Decoder._run_layers."""

    def __init__(self, layers: list[_Layer], arch: ArchSpec, widths: tuple[int, int, int]) -> None:
        """`widths` are the columns of q, of k, and of the ffn on this rank."""
        q, kv, ffn = widths
        dim = arch.head_dim
        sizes = (arch.hidden, q // dim, kv // dim, dim, ffn)
        scales = (arch.norm_eps, attention_scale_of(arch), arch.attn_softcap, arch.residual_scale)
        self._owners = layers  # native code points into them
        is_wide = arch.qk_norm_kind == "wide"
        self._stage = load_native().DecoderStage(sizes, scales, is_wide, _ACTIVATION_CODES[arch.activation])
        self._kv: list[KVLayer] | None = None
        for layer in layers:
            norms = [layer.attn_norm, layer.ffn_norm, layer.attn_post, layer.ffn_post]
            before, between, *after = [None if norm is None else norm.weight for norm in norms]
            self._stage.add_layer(
                [_address(weight) for weight in (before, between, layer.q_norm, layer.k_norm, *after)],
                layer.window or 0,
                layer.cos_sin.data_ptr(),
                layer.cos_sin.shape[1],
                [part.native_pieces() for part in (layer.qkv, layer.o, layer.gate_up, layer.down)],
            )

    @staticmethod
    def covers(arch: ArchSpec) -> bool:
        """Whether the native stage knows every step of this model; else the layers run one by one."""
        is_plain = arch.norm_kind == "rms" and arch.norm_placement != "parallel"
        return is_plain and not (arch.qk_norm and arch.qk_norm_kind == "heads")

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
        self._rope = self._complete_rope(build)
        self._tables = self._share_tables(build, max_len or arch.max_position)
        self._q_sizes, self._ffn_sizes, self._hidden_sizes = _sizes(build.q), _sizes(build.ffn), _sizes(build.hidden)
        q, kv, ffn = build.q[rank].size, build.kv[rank].size, build.ffn[rank].size
        self._widths = (arch.hidden, arch.hidden, q + 2 * kv, q, 2 * ffn, ffn)
        self._buffers = self._allocate(0)
        self._kv_sizes = _sizes(build.kv)
        self._q_spans, self._kv_spans = build.q, build.kv
        self._gate = _GATES[arch.activation]
        is_fused = mesh.tp == 1 and FusedStage.covers(arch)
        self._fused = FusedStage(self._layers, arch, (q, kv, ffn)) if is_fused else None

    def _complete_rope(self, build: _Builder) -> RopeSpec:
        """The rotary rule, with the factors that GGUF files keep in tensors."""
        rope = self.arch.rope
        if rope.kind != "longrope" or rope.short_factors:
            return rope
        short, long = (tuple(build.vector(name, rope.dim // 2).tolist()) for name in _LONGROPE)
        return msgspec.structs.replace(rope, short_factors=short, long_factors=long)

    def _share_tables(self, build: _Builder, positions: int) -> list[Tensor]:
        """Makes the tables of cosines and sines and gives each layer the one it reads."""
        arch, name = self.arch, "rope_freqs.weight"
        divisors = build.vector(name, arch.rope.dim // 2) if name in build.source.names() else None
        table = cos_sin_table(self._rope, positions, divisors)
        local = None if arch.rope_local is None else cos_sin_table(arch.rope_local, positions)
        still = torch.empty(positions, 0)  # rotates no dimension
        for layer in self._layers:
            rotated = local if layer.is_local and local is not None else table
            layer.cos_sin = rotated if layer.rotates else still
        return [table] if local is None else [table, local]

    def _build_ends(self, build: _Builder) -> None:
        """Embedding on the first stage, norm and head on the last; one matrix serves both where they are tied."""
        arch, mesh = self.arch, self._mesh
        rows = build.vocab[mesh.tp_rank]
        self._head: Linear | None = None
        self._embedding: Embedding | None = None
        if mesh.is_last_stage:
            name = "model.embed_tokens" if arch.tie_embeddings else "lm_head"
            self._head = build.linear("", [(name, arch.vocab_size, rows)], arch.hidden, bias=False, unit=arch.unit_head)
            self._norm = build.norm("model.norm")
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
        return sum(layer.nbytes for layer in self._layers) + head + embedding + sum(t.nbytes for t in self._tables)

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor | None:
        """Logits [S, V] float32 on the last stage, None elsewhere. Views of internal buffers are never returned."""
        num_tokens = batch.token_ids.shape[0]
        buffers = self._views(num_tokens)
        hidden = buffers[0]
        if self._embedding is not None:
            self._embedding(batch.token_ids, hidden)
            if self.arch.embed_scale != 1.0:
                hidden *= self.arch.embed_scale
        else:
            hidden.copy_(self._group.recv_prev((num_tokens, self.arch.hidden), torch.float32))
        table = step_table(self._rope, batch) if depends_on_length(self._rope) else None
        if self._fused is not None and table is None:
            self._fused.run(batch, kv, buffers)
        else:
            self._run_layers(batch, kv, buffers, table)
        if self._head is None:
            self._group.send_next(hidden)
            return None
        return self._logits(hidden, batch.logits_index)

    def _run_layers(
        self, batch: ForwardBatch, kv: list[KVLayer], buffers: list[Tensor], table: Tensor | None = None
    ) -> None:
        """Layer by layer. Ranks put their columns together before and after each product that needs all inputs. `table`
        holds the cosines and sines of the step's tokens where they depend on more than the position."""
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
            self._join(hidden, self._project(layer.down, product, self._ffn_sizes), layer.ffn_post)

    def _attend(
        self,
        layer: _Layer,
        x: Tensor,
        layer_kv: KVLayer,
        batch: ForwardBatch,
        buffers: list[Tensor],
        table: Tensor | None,
    ) -> Tensor:
        """The attention branch of x [T, H], before its norm."""
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
        return self._project(layer.o, attended, self._q_sizes)

    def _norm_qk(self, layer: _Layer, qkv: Tensor) -> None:
        """Norms of q and k other than one vector for every head, in place."""
        rank, eps = self._mesh.tp_rank, self.arch.norm_eps
        q_width, kv_width = self._q_sizes[rank], self._kv_sizes[rank]
        q, k, _v = qkv.split([q_width, kv_width, kv_width], dim=1)
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        for part, weight, spans in ((q, layer.q_norm, self._q_spans), (k, layer.k_norm, self._kv_spans)):
            if self.arch.qk_norm_kind == "heads":
                norm_each_head(part.unflatten(1, (-1, self.head_dim)), weight, eps)
            elif self._group.size == 1:
                ops.rms_norm(part, weight, eps, part)
            else:
                whole = self._whole(part, spans)
                part.copy_(ops.rms_norm(whole, weight, eps)[:, spans[rank].start : spans[rank].stop])

    def _whole(self, part: Tensor, spans: list[Span]) -> Tensor:
        """All columns in order, once each, where ranks may share some."""
        gathered = self._group.all_gather(part.contiguous(), _sizes(spans)).split(_sizes(spans), dim=1)
        columns, have = [], 0
        for span, piece in zip(spans, gathered, strict=True):
            columns.append(piece[:, max(have - span.start, 0) :])
            have = max(have, span.stop)
        return torch.cat(columns, dim=1)

    def _project(self, last: Linear, x: Tensor, sizes: list[int]) -> Tensor:
        """All columns of a product that needs all inputs; `sizes` are the columns of x on each rank."""
        gather = self._group.all_gather
        part = torch.empty(x.shape[0], self._hidden_sizes[self._mesh.tp_rank])
        return gather(last(gather(x, sizes), part), self._hidden_sizes)

    def _join(self, hidden: Tensor, branch: Tensor, post: Norm | None) -> None:
        """Ends a branch: normed and scaled where the family says so, it is added to the residual stream."""
        if post is not None:
            branch = post(branch)
        if self.arch.residual_scale != 1.0:
            branch = branch * self.arch.residual_scale
        hidden += branch

    def _logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        assert self._head is not None
        num_rows = index.shape[0]
        if num_rows == 0:
            return torch.empty(0, self.vocab_size)
        rows = hidden if num_rows == hidden.shape[0] else hidden.index_select(0, index)
        logits = torch.empty(num_rows, self._head.n)
        assert self._norm is not None
        self._head(self._norm(rows), logits)
        if self.arch.logit_scale != 1.0:
            logits *= self.arch.logit_scale
        if self.arch.logit_softcap:
            cap = self.arch.logit_softcap
            torch.tanh(logits.div_(cap), out=logits).mul_(cap)
        return logits if self._group.size == 1 else self._group.all_gather(logits, self._vocab_sizes)

    def _views(self, num_tokens: int) -> list[Tensor]:
        if self._buffers[0].shape[0] < num_tokens:
            self._buffers = self._allocate(max(num_tokens, 2 * self._buffers[0].shape[0]))
        return [buffer[:num_tokens] for buffer in self._buffers]

    def _allocate(self, num_tokens: int) -> list[Tensor]:
        return [torch.empty(num_tokens, width) for width in self._widths]

"""Llama-like, GPT-like and mixture-of-experts families on NVIDIA GPUs: one stage on one tensor-parallel rank. Uses the kernels
of csrc/cuda; each GEMM runs on the faster of our own kernel and cuBLAS, prompt attention on the fastest kernel measured.

Built by workers.cuda; `run` launches a step on the current stream without synchronizing and reads only preallocated tensors, so
a decode step can be captured in a CUDA graph.

Legend: T tokens, R sequences, S tokens whose logits are wanted, H hidden, V vocabulary, B blocks of the longest table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from trireme.errors import ModelError
from trireme.machine.gpu_support import lacks_on_gpu
from trireme.machine.step_sizes import usual_rows
from trireme.model.bodies import MoeBody
from trireme.model.reader import ArchSpec
from trireme.models.arch.layer_config import layer_config_of
from trireme.models.arch.norms import norm_each_head, whole_columns
from trireme.models.arch.rope import table_rows
from trireme.models.cuda import ops
from trireme.models.cuda.attention.prefill import Prompts
from trireme.models.cuda.attention.registry import Need, choose_on_gpu
from trireme.models.cuda.embed_head import CudaEmbedHead
from trireme.models.cuda.layer_weights import CudaLayer, Parts, make_rotations
from trireme.models.cuda.layers.norm import CudaNorm
from trireme.models.cuda.layers.protocol import LinearLayer, empty_quantized_like
from trireme.models.cuda.layers.quantized_io import Product, QuantizedInput, multiply, narrowed
from trireme.models.cuda.layers.row_amax import RowAmax
from trireme.models.cuda.ops import CudaPagedKV
from trireme.models.cuda.sequence_parallel import RowGroup, Rows, SplitRows, WholeRows
from trireme.models.cuda.side_stream import forked
from trireme.models.cuda.weights.sources import DeviceWeights
from trireme.models.forward import Group, SoloGroup
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.mesh import Mesh

ALONE = Mesh(1, 1, 1)
_HIDDEN = 2  # the first buffers hold hidden states
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}


@dataclass(slots=True)
class CudaBatch:
    """Inputs of one step on the device. The first `num_decodes` sequences have one token each; the rest are prompts."""

    token_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32, mapped by CudaModel.table_rows
    slots: Tensor  # [T] int32
    context_len: Tensor  # [R] int32, 0 for padding
    block_table: Tensor  # [R, B] int32
    logits_index: Tensor | None  # [S] int64; None: every token's
    num_decodes: int
    splits: int = 1
    prompts: Prompts | None = None


def refuse_uncovered(arch: ArchSpec, max_len: int) -> None:
    """Raises ModelError naming what the GPU body lacks for this model."""
    if missing := lacks_on_gpu(arch, max_len):
        raise ModelError(f"{arch.family} needs what the GPU body lacks: {', '.join(missing)}", hint="--device cpu")


class CudaModel:
    """The layers, embedding and head of one stage, sharded to this rank, on the current device. `weight_bytes` counts device
    memory.

    `source` yields a rank's shard by name (models/weights/tp_shards.py).
    """

    def __init__(
        self,
        arch: ArchSpec,
        source: DeviceWeights,
        dtype: torch.dtype,
        *,
        max_len: int,
        progress: Callable[[str, int, int], None],
        place: tuple[Mesh, Group | None] = (ALONE, None),
        kv_dtype: torch.dtype | None = None,
        split_from: int = 0,
    ) -> None:
        """`place`: the mesh position and the group of ranks. `kv_dtype`: dtype of the KV cache, the weights' unless float8 is
        requested. Steps with prompts and at least `split_from` tokens use sequence parallelism (0: never). Raises ModelError
        for a model that the GPU body does not cover."""
        refuse_uncovered(arch, max_len)
        mesh, group = place
        self.mesh, self.group = mesh, group or SoloGroup()
        self._split_from = split_from if mesh.tp > 1 else 0
        self.shares = RankSpans(arch, mesh)
        self.arch, self.form = arch, layer_config_of(arch)
        self._norms_in_rotary = arch.qk_norm_kind == "head"
        if 0 < self.form.learned_positions < max_len:
            raise ModelError(f"{arch.family} has {self.form.learned_positions} positions; {max_len} are asked for")
        self.dtype, self.kv_dtype = dtype, kv_dtype or dtype
        self.vocab_size = arch.vocab_size
        self.q_heads, self.kv_heads = self.shares.q_heads, self.shares.kv_heads
        stage = mesh.layers(arch.num_layers)
        parts = Parts(arch, self.form, self.shares, source, dtype)
        rotations = make_rotations(arch, source, max_len)
        self.table_rows = table_rows(arch.rope, max_len)
        total = stage.size + 1
        self._layers = []
        for done, index in enumerate(range(stage.start, stage.stop)):
            progress("weights", done, total)
            self._layers.append(CudaLayer(parts, rotations, index))
        self._embed_head = CudaEmbedHead(parts, mesh, self.group)
        self.weight_bytes = parts.weight_bytes
        windows = [layer.window for layer in self._layers if layer.window]
        is_fp8 = self.kv_dtype == torch.float8_e4m3fn
        need = Need(
            dtype,
            arch.head_dim,
            min(windows, default=0),
            softcap=arch.attn_softcap > 0,
            sinks=any(layer.sinks is not None for layer in self._layers),
            fp8_cache=is_fp8,
        )
        self.chosen_attention = choose_on_gpu(need, self.q_heads, self.kv_heads)
        self.prompt_attention = self.chosen_attention.attention(arch.attn_softcap)
        self.buffers = self._allocate(0)
        self._largest = RowAmax(2 * len(self._layers))
        progress("weights", total, total)

    @property
    def num_kv_layers(self) -> int:
        return len(self._layers)

    @property
    def head_dim(self) -> int:
        return self.arch.head_dim

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[CudaPagedKV]:
        """Zeroed KV caches of all layers."""
        shape = (num_blocks, self.kv_heads, block_size, self.head_dim)
        pairs = [[torch.zeros(shape, dtype=self.kv_dtype, device="cuda") for _ in range(2)] for _ in self._layers]
        return [CudaPagedKV(k, v) for k, v in pairs]

    def scratch_floats(self, rows: int, splits: int) -> int:
        """Scratch, in floats, that decode attention needs for `rows` sequences."""
        return ops.decode_scratch(rows, self.q_heads, self.head_dim, splits)

    def run(self, batch: CudaBatch, kv: list[CudaPagedKV], scratch: Tensor | None = None) -> Tensor:
        """Logits [S, V] of one step, in the model's dtype. A stage that is not the last sends its hidden states [T, H] on and
        returns them."""
        rows = self._rows(batch.token_ids.shape[0], batch.prompts)
        residual, normed, qkv, attended, gate_up, product = self._views(rows)
        self._embed_head.begin(batch.token_ids, batch.positions, rows, residual, normed)
        largest = self._noted(rows.num)
        pending: Product | None = None
        for layer, cache in zip(self._layers, kv, strict=True):
            x = self._normed(rows, layer.qkv, normed, layer.attn_norm, residual, pending)
            turned = self._qkv(layer, x, qkv)
            ops.rotary_and_cache(
                qkv,
                self.q_heads,
                cache,
                layer.cos_sin,
                batch.positions,
                batch.slots,
                q_norm=layer.q_norm if self._norms_in_rotary else None,
                k_norm=layer.k_norm if self._norms_in_rotary else None,
                eps=self.arch.norm_eps,
                scales=turned.scales,
            )
            noted = next(largest) if batch.prompts is None and layer.o.input_dtype(rows.num) else None
            found = self._attend(batch, layer, qkv, cache, attended, scratch, noted)
            if self.form.is_parallel:
                pending = self._side_by_side(rows, layer, x, narrowed(layer.o, found, noted), largest, residual)
                continue
            x = narrowed(layer.o, found, noted)
            branch = self._post(self._branch(rows, layer.o, x, normed), layer.attn_post)
            if layer.experts is not None:
                x = self._normed(rows, layer.experts, normed, layer.ffn_norm, residual, branch)
                branch = self._branch(rows, layer.experts, x, normed)
            else:
                x = self._normed(rows, layer.gate_up, normed, layer.ffn_norm, residual, branch)
                x = self._activated(layer, x, gate_up, product, largest)
                branch = self._branch(rows, layer.down, x, normed)
            pending = self._post(branch, layer.ffn_post)
        if not self.mesh.is_last_stage:
            hidden = rows.whole(self._norm_into(rows, normed, None, residual, pending))
            self.group.send_next(hidden)
            return hidden
        hidden = rows.whole(self._norm_into(rows, normed, self._embed_head.norm, residual, pending))
        return self._embed_head.logits(hidden, batch.logits_index)

    def _rows(self, num_tokens: int, prompts: Prompts | None) -> Rows:
        """Which tokens of a step's hidden states this rank keeps."""
        if prompts is not None and 0 < self._split_from <= num_tokens:
            return SplitRows(num_tokens, cast(RowGroup, self.group))
        return WholeRows(num_tokens, self.group)

    def _noted(self, num_rows: int) -> Iterator[Tensor | None]:
        """Buffers for the per-token amax that this step's kernels compute for the quantizer."""
        linears = (linear for layer in self._layers for linear in (layer.o, layer.experts or layer.down))
        rounding = (linear.input_dtype(num_rows) for linear in linears)
        return self._largest.cleared(num_rows) if any(rounding) else repeat(None)

    def _activated(
        self,
        layer: CudaLayer,
        x: Tensor | QuantizedInput,
        gate_up: Tensor,
        product: Tensor,
        largest: Iterator[Tensor | None],
    ) -> Tensor | QuantizedInput:
        """The down projection's input: gate_up and activation. Takes the next of `largest` if that input is quantized."""
        found = self._product(layer.gate_up, x, gate_up)
        noted = next(largest) if layer.down.input_dtype(product.shape[0]) else None
        act = ops.gated_activation if self.form.has_gate else ops.activation
        act(found.values, product, self.form.activation, found.scales, noted)
        return narrowed(layer.down, product, noted)

    def _qkv(self, layer: CudaLayer, x: Tensor | QuantizedInput, out: Tensor) -> Product:
        """The qkv linear layer, with q and k norms unless one weight vector is shared by all heads (ops.rotary_and_cache)."""
        if not self.arch.qk_norm or self._norms_in_rotary:
            return self._product(layer.qkv, x, out)
        multiply(layer.qkv, x, out)
        arch, shares = self.arch, self.shares
        q, k = out[:, : shares.q.size], out[:, shares.q.size : shares.q.size + shares.kv.size]
        for part, weight, spans in ((q, layer.q_norm, shares.all_q), (k, layer.k_norm, shares.all_kv)):
            assert weight is not None
            if arch.qk_norm_kind == "heads":
                norm_each_head(part.unflatten(1, (-1, arch.head_dim)), weight, arch.norm_eps)
            elif self.mesh.tp == 1:
                ops.rms_norm(part, weight, arch.norm_eps, part)
            else:
                whole = whole_columns(part, spans, self.group)
                own = spans[self.mesh.tp_rank]
                part.copy_(ops.rms_norm(whole, weight, arch.norm_eps, whole)[:, own.start : own.stop])
        return Product(out)

    def _product(self, linear: LinearLayer, x: Tensor | QuantizedInput, out: Tensor) -> Product:
        """Applies a linear layer to x, into `out`; scales may be left to the reader."""
        if isinstance(x, Tensor):
            return Product(linear(x, out))
        return Product(out, linear.unscaled(x.values, x.scale, out))

    def _branch(self, rows: Rows, linear: LinearLayer, x: Tensor | QuantizedInput, out: Tensor) -> Product:
        """Row-parallel linear layer: the sum over ranks in `out`, of the tokens that this rank keeps."""
        some = out[: rows.num]
        if self.mesh.tp == 1:
            return self._product(linear, x, some)
        multiply(linear, x, some)
        return Product(rows.summed(out))

    def _side_by_side(
        self,
        rows: Rows,
        layer: CudaLayer,
        x: Tensor | QuantizedInput,
        attended: Tensor | QuantizedInput,
        largest: Iterator[Tensor | None],
        residual: Tensor,
    ) -> Product:
        """Parallel attention and feed-forward branches over the same residual; x is the attention's normed input. Returns
        their sum, reduced over the ranks once."""
        _, normed, _, _, gate_up, product = self._views(rows)
        if layer.ffn_norm is not None or layer.gate_up.input_dtype(rows.num) != layer.qkv.input_dtype(rows.num):
            x = self._normed(rows, layer.gate_up, normed, layer.ffn_norm or layer.attn_norm, residual, None)
        x = self._activated(layer, x, gate_up, product, largest)
        some = normed[: rows.num]
        other = torch.empty_like(some)
        multiply(layer.o, attended, some)
        multiply(layer.down, x, other)
        some.add_(other)
        return Product(rows.summed(normed))

    def _normed(
        self,
        rows: Rows,
        linear: LinearLayer,
        out: Tensor,
        norm: CudaNorm | None,
        residual: Tensor,
        branch: Product | None,
    ) -> Tensor | QuantizedInput:
        """residual += branch, then the norm of all tokens, fused with quantization if `linear` takes quantized input."""
        dtype = linear.input_dtype(rows.num)
        if norm is None or dtype is None:
            return rows.whole(self._norm_into(rows, out, norm, residual, branch))
        narrow, scale = empty_quantized_like(residual, dtype)
        kept, own = rows.own(residual), (rows.own(narrow), rows.own(scale))
        if branch is None:
            norm.narrow(kept, *own)
        else:
            x, scales = self._scaled_branch(branch)
            norm.narrow(x, *own, residual=kept, scales=scales)
        return QuantizedInput(rows.whole(narrow), rows.whole(scale))

    def _scaled_branch(self, branch: Product) -> Product:
        if self.arch.residual_scale != 1.0:
            branch.values.mul_(self.arch.residual_scale)
        return branch

    def _norm_into(
        self, rows: Rows, out: Tensor, norm: CudaNorm | None, residual: Tensor, branch: Product | None
    ) -> Tensor:
        """residual += branch for the tokens kept here. Returns the tensor with the normed tokens: `out`, or the residual if
        there is no norm."""
        kept = rows.own(residual)
        if branch is None:
            if norm is None:
                return residual
            norm(kept, rows.own(out))
            return out
        x, scales = self._scaled_branch(branch)
        if norm is not None:
            norm(x, rows.own(out), residual=kept, scales=scales)
            return out
        if scales is not None:
            x.mul_(scales.rows[:, None]).mul_(scales.columns)
        kept.add_(x)
        return residual

    def _post(self, branch: Product, norm: CudaNorm | None) -> Product:
        if norm is None:
            return branch
        return Product(norm(branch.values, branch.values, scales=branch.scales))

    def _attend(
        self,
        batch: CudaBatch,
        layer: CudaLayer,
        qkv: Tensor,
        cache: CudaPagedKV,
        out: Tensor,
        scratch: Tensor | None,
        largest: Tensor | None,
    ) -> Tensor:
        """Attention [T, Hq * D], in `out` or in the kernel's own output. Decode kernels write the per-token amax to
        `largest`."""
        decodes, prompts = batch.num_decodes, batch.prompts
        is_both = bool(decodes) and prompts is not None
        with (
            forked() if is_both and qkv.is_cuda else nullcontext() as side
        ):  # one waits for memory, the other for arithmetic
            if decodes:
                with torch.cuda.stream(side):
                    ops.decode_attention(
                        qkv,
                        self.q_heads,
                        cache,
                        batch.block_table[:decodes],
                        batch.context_len,
                        layer.scale,
                        out,
                        window=layer.window,
                        softcap=self.arch.attn_softcap,
                        sinks=layer.sinks,
                        splits=batch.splits,
                        scratch=scratch,
                        largest=largest,
                    )
            if prompts is None:
                return out
            rest = qkv[decodes:], self.q_heads, cache, prompts, layer.scale, layer.window, out[decodes:]
            found = self.prompt_attention(*rest, may_move=not decodes, sinks=layer.sinks)
        return out if decodes else found

    def _views(self, rows: Rows) -> list[Tensor]:
        """The buffers, sliced to the step; hidden states include the padding of sequence parallelism."""
        if self.buffers[0].shape[0] < rows.total:
            self.buffers = self._allocate(rows.total)
        return [buffer[: rows.total if i < _HIDDEN else rows.num] for i, buffer in enumerate(self.buffers)]

    def reserve(self, num_tokens: int) -> None:
        """Allocates activations for the largest step, so that their addresses stay fixed for CUDA graphs."""
        self.buffers = self._allocate(num_tokens)
        self.prompt_attention.prepare(self.buffers[2], self.q_heads, self.kv_heads, self.form.attention_scale)
        for rows in usual_rows(num_tokens) if self.buffers[0].is_cuda else ():
            self._load_gemms(rows)

    def _load_gemms(self, rows: int) -> None:
        """Runs the linear layers of one layer over `rows` tokens: a library loads the kernels of a size at its first use, for tens
        of milliseconds in which streams would stand still."""
        layer = self._layers[0]
        _, normed, qkv, attended, gate_up, product = (buffer[:rows] for buffer in self.buffers)
        multiply(layer.qkv, normed, qkv)
        multiply(layer.o, attended, normed)
        if layer.experts is None:
            multiply(layer.gate_up, normed, gate_up)
            multiply(layer.down, product, normed)

    def _allocate(self, num_tokens: int) -> list[Tensor]:
        """Activation buffers for a step of `num_tokens` tokens, with or without sequence parallelism."""
        hidden, ffn = self.arch.hidden, 0 if isinstance(self.arch.body, MoeBody) else self.shares.ffn.size
        num_tokens = -(-num_tokens // self.mesh.tp) * self.mesh.tp if self._split_from else num_tokens
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        widths = (hidden, hidden, q + 2 * kv, q, (1 + self.form.has_gate) * ffn, ffn)
        return [torch.empty(num_tokens, width, dtype=self.dtype, device="cuda") for width in widths]

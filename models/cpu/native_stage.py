"""The Llama-like families with all layers of a stage in one native call (csrc/cpu/decoder.h), without tensor parallelism.
Tensors are numpy arrays; a process that runs only this needs no torch.

Built by models.load; run by the worker once per step, from one thread. Bit-identical to models/cpu/decoder. Activations live
in buffers that grow to the largest step seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.model.reader import ArchSpec
from trireme.models.arch.layer_config import attention_scale_of
from trireme.models.arch.rope import depends_on_length, step_table
from trireme.models.cpu.stage_weights import LayerWeights, StageWeights, soft_capped
from trireme.models.forward import Group, HostBatch, HostKV, Logits
from trireme.models.native import load_native
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import WeightSource
from trireme.topology.mesh import Mesh

_ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}


class _Layers:
    """The native stage over all layers. `table` replaces the cosines and sines of rotary layers."""

    def __init__(self, weights: StageWeights, table: Floats | None = None) -> None:
        arch = weights.arch
        q, kv, ffn = weights.shares.q[0].size, weights.shares.kv[0].size, weights.shares.ffn[0].size
        dim = arch.head_dim
        sizes = (arch.hidden, q // dim, kv // dim, dim, ffn)
        scales = (arch.norm_eps, attention_scale_of(arch), arch.attn_softcap, arch.residual_scale)
        is_wide = arch.qk_norm_kind == "wide"
        self._owners = weights.layers, table  # the stage keeps addresses in them, and in the caches of self._kv
        self._stage = load_native().DecoderStage(sizes, scales, is_wide, _ACTIVATION_CODES[arch.activation])
        self._kv: list[HostKV] | None = None
        for layer in weights.layers:
            self._add(layer, table if table is not None and layer.rotates else layer.cos_sin)

    def _add(self, layer: LayerWeights, cos_sin: Floats) -> None:
        norms = [layer.attn_norm, layer.ffn_norm, layer.attn_post, layer.ffn_post]
        before, between, *after = [None if norm is None else norm.weight for norm in norms]
        vectors = (before, between, layer.q_norm, layer.k_norm, *after)
        self._stage.add_layer(
            vectors,
            layer.window or 0,
            cos_sin,
            [part.native_pieces() for part in (layer.qkv, layer.o, layer.gate_up, layer.down)],
        )

    def run(self, batch: HostBatch, positions: NDArray[np.int32], kv: list[HostKV], buffers: list[Floats]) -> None:
        """One step, with the entries `positions` of the tables. Releases the GIL while the layers run."""
        if kv is not self._kv:
            self._stage.bind_kv([(layer.k, layer.v) for layer in kv])
            self._kv = kv
        inputs = (positions, batch.slots, batch.query_start, batch.context_len, batch.block_table)
        self._stage.run(inputs, buffers)


class NativeDecoder:
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
        assert mesh.tp == 1
        self.arch = arch
        self.vocab_size, self.head_dim = arch.vocab_size, arch.head_dim
        self._group = group
        self._native: Any = load_native()
        self.weights = StageWeights(arch, mesh, source, dense=dense, progress=progress, max_len=max_len)
        q, kv, ffn = (
            spans[0].size for spans in (self.weights.shares.q, self.weights.shares.kv, self.weights.shares.ffn)
        )
        self.num_kv_layers, self.kv_heads = len(self.weights.layers), kv // arch.head_dim
        most: int = self._native.FEED_FORWARD_ROWS
        self._widths = ((arch.hidden, 0), (arch.hidden, 0), (q + 2 * kv, 0), (q, 0), (2 * ffn, most), (ffn, most))
        self._layers = _Layers(self.weights)
        self._varying: tuple[Floats, _Layers] | None = None  # a per-step cos/sin table and the layers that read it
        self._allocate(0)

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits | None:
        """Logits [S, V] float32 on the last stage, None elsewhere. Never returns internal buffers."""
        num_tokens = batch.token_ids.shape[0]
        if self._buffers[0].shape[0] < num_tokens:
            self._allocate(max(num_tokens, 2 * self._buffers[0].shape[0]))
        hidden = self._buffers[0][:num_tokens]
        self._begin(batch, hidden)
        table = step_table(self.weights.rope, batch) if depends_on_length(self.weights.rope) else None
        if table is None:
            self._layers.run(batch, batch.positions, kv, self._buffers)
        else:
            self._run_varying(batch, table, kv)
        if self.weights.head is None:
            from trireme.models.cpu.tensors import send_next

            send_next(self._group, hidden)
            return None
        return self._logits(hidden, batch.logits_index)

    def _begin(self, batch: HostBatch, hidden: Floats) -> None:
        """Fills `hidden` with token embeddings on the first stage, else from the previous stage."""
        if self.weights.embedding is None:
            from trireme.models.cpu.tensors import receive_prev

            receive_prev(self._group, hidden)
            return
        (weight,) = self.weights.embedding.weights
        self._native.gather_rows(weight.native, batch.token_ids, hidden)
        if self.arch.embed_scale != 1.0:
            hidden *= np.float32(self.arch.embed_scale)

    def _run_varying(self, batch: HostBatch, table: Floats, kv: list[HostKV]) -> None:
        """A step with its own cos/sin table [T, dim]: token t reads entry t."""
        num_tokens = table.shape[0]
        if self._varying is None or self._varying[0].shape[0] < num_tokens:
            own = np.empty((max(num_tokens, 64), table.shape[1]), np.float32)
            self._varying = own, _Layers(self.weights, own)
        own, layers = self._varying
        own[:num_tokens] = table
        layers.run(batch, np.arange(num_tokens, dtype=np.int32), kv, self._buffers)

    def _logits(self, hidden: Floats, index: np.ndarray) -> Logits:
        head, norm = self.weights.head, self.weights.norm
        assert head is not None
        assert norm is not None
        num_rows = index.shape[0]
        logits = np.empty((num_rows, self.vocab_size), np.float32)
        if num_rows == 0:
            return logits
        rows = hidden if num_rows == hidden.shape[0] else hidden[index]
        normed = np.empty_like(rows)
        self._native.rms_norm(rows, norm.weight, self.arch.norm_eps, normed)
        head.multiply(normed, logits)
        soft_capped(logits, self.arch)
        return logits

    def _allocate(self, num_tokens: int) -> None:
        self._buffers = [
            np.empty((min(num_tokens, most or num_tokens), width), np.float32) for width, most in self._widths
        ]

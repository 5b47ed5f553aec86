"""A checkpoint of models/cpu/gpt under the names of the Llama-like decoder: what the GPU's body reads.

Fused q, k and v are seen apart, matrices as [outputs, inputs]. Used by models/registry; copies no more than what is asked for.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trireme.model.reader import ArchSpec
from trireme.models.cpu.embed_head import transposed
from trireme.models.cpu.gpt import NAMES, norm_names, qkv_heads
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import RawMatrix, WeightSource
from trireme.topology.mesh import split_heads

_QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class DecoderNames:
    """A WeightSource over one that has the names of models.cpu.gpt."""

    def __init__(self, source: WeightSource, arch: ArchSpec) -> None:
        names = NAMES[arch.family]
        self.path: Path = source.path
        self._source, self._names, self._arch = source, names, arch
        self._stored = {
            "model.embed_tokens": names.embed,
            "model.embed_positions": "wpe",
            "model.norm": names.norm,
            "lm_head": names.head,
        }
        norms = zip(("input_layernorm", "post_attention_layernorm"), norm_names(arch), strict=False)
        parts = {
            **dict(norms),
            **{f"self_attn.{part}": names.qkv for part in _QKV},
            "self_attn.o_proj": names.o,
            "mlp.up_proj": names.up,
            "mlp.down_proj": names.down,
        }
        for layer in range(arch.num_layers):
            for name, stored in parts.items():
                self._stored[f"model.layers.{layer}.{name}"] = f"{names.layer}.{layer}.{stored}"
        counts = arch.num_heads, arch.num_kv_heads
        own = split_heads(*counts, 1, 0)
        order = qkv_heads(*counts, own, grouped=names.grouped)
        rows = (order[:, None] * arch.head_dim + np.arange(arch.head_dim)).reshape(-1)
        q, kv = (count * arch.head_dim for count in counts)
        self._rows = np.split(rows, (q, q + kv))

    def names(self) -> set[str]:
        stored = self._source.names()
        suffixes = (".weight", ".bias")
        return {name + suffix for name, at in self._stored.items() for suffix in suffixes if at + suffix in stored}

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        stem = name.removesuffix(".weight")
        rows = self._rows_of(stem)
        whole = self._whole(stem, n if rows is None else self._width, k)
        return whole if rows is None else RawMatrix(whole.kind, whole.raw[rows], n, k)

    def vector(self, name: str, size: int) -> Floats:
        stem, _, suffix = name.rpartition(".")
        rows, stored = self._rows_of(stem), f"{self._stored[stem]}.{suffix}"
        return self._source.vector(stored, size) if rows is None else self._source.vector(stored, self._width)[rows]

    @property
    def _width(self) -> int:
        """Outputs of q, k and v together."""
        return sum(rows.size for rows in self._rows)

    def _rows_of(self, stem: str) -> np.ndarray | None:
        """Where the rows of q, k or v are in what is stored; None for what is stored by itself."""
        part = _QKV.get(stem.rpartition(".")[2])
        return None if part is None else self._rows[part]

    def _whole(self, stem: str, n: int, k: int) -> RawMatrix:
        stored = self._stored[stem] + ".weight"
        if self._names.inputs_first and stem.startswith("model.layers."):
            return transposed(self._source.matrix(stored, k, n))
        return self._source.matrix(stored, n, k)

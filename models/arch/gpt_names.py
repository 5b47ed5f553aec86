"""Presents a checkpoint of models/cpu/gpt under the names of the Llama-like decoder, for the GPU body.

Splits fused q, k and v and transposes matrices to [outputs, inputs]. Used by models/registry; copies only what is requested.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from trireme.model.bodies import GptBody
from trireme.model.reader import ArchSpec
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import RawMatrix, WeightSource
from trireme.topology.mesh import HeadSpans, split_heads

_QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


class DecoderNames:
    """A WeightSource with decoder names over one with the names of models.cpu.gpt."""

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
        """Outputs of q, k or v within the fused matrix; None for a weight that is not fused."""
        part = _QKV.get(stem.rpartition(".")[2])
        return None if part is None else self._rows[part]

    def _whole(self, stem: str, n: int, k: int) -> RawMatrix:
        stored = self._stored[stem] + ".weight"
        if self._names.inputs_first and stem.startswith("model.layers."):
            return self._source.matrix(stored, k, n).transposed()
        return self._source.matrix(stored, n, k)


class Names(NamedTuple):
    """Hugging Face names of a family, without `prefix`; names inside a layer follow `layer`."""

    prefix: str
    embed: str
    head: str
    norm: str
    layer: str
    attn_norm: str
    ffn_norm: str
    qkv: str
    o: str
    up: str
    down: str
    grouped: bool = True  # qkv outputs are G groups of (queries, key, value); else all queries, all keys, all values
    inputs_first: bool = False  # matrices are stored [inputs, outputs]
    renamed: tuple[str, str] = ("", "")  # (name in newer files, name used here)
    buffers: tuple[str, ...] = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")


NAMES = {
    "gpt2": Names(
        prefix="transformer.",
        embed="wte",
        head="lm_head",
        norm="ln_f",
        layer="h",
        attn_norm="ln_1",
        ffn_norm="ln_2",
        qkv="attn.c_attn",
        o="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        grouped=False,
        inputs_first=True,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
    "gpt_neox": Names(
        prefix="gpt_neox.",
        embed="embed_in",
        head="embed_out",
        norm="final_layer_norm",
        layer="layers",
        attn_norm="input_layernorm",
        ffn_norm="post_attention_layernorm",
        qkv="attention.query_key_value",
        o="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        renamed=("lm_head.weight", "embed_out.weight"),
    ),
    "falcon": Names(
        prefix="transformer.",
        embed="word_embeddings",
        head="lm_head",
        norm="ln_f",
        layer="h",
        attn_norm="input_layernorm",
        ffn_norm="post_attention_layernorm",
        qkv="self_attention.query_key_value",
        o="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        buffers=("self_attention.rotary_emb.inv_freq",),
    ),
}


def norm_names(arch: ArchSpec) -> tuple[str, ...]:
    """Norms of a layer: before attention, and before the feed-forward network unless they share one."""
    names, kind = NAMES[arch.family], gpt_body(arch).norms
    if kind == "separate":
        return ("ln_attn", "ln_mlp")
    return (names.attn_norm,) if kind == "shared" else (names.attn_norm, names.ffn_norm)


def qkv_heads(num_heads: int, num_kv_heads: int, own: HeadSpans, *, grouped: bool) -> np.ndarray:
    """Indices of one rank's heads (its q, then its k, then its v) within a fused matrix."""
    q, kv = np.arange(own.q.start, own.q.stop), np.arange(own.kv.start, own.kv.stop)
    if not grouped:
        return np.concatenate((q, num_heads + kv, num_heads + num_kv_heads + kv))
    share = num_heads // num_kv_heads
    return np.concatenate(
        (q // share * (share + 2) + q % share, kv * (share + 2) + share, kv * (share + 2) + share + 1)
    )


def gpt_body(arch: ArchSpec) -> GptBody:
    """The body of a family in NAMES."""
    assert isinstance(arch.body, GptBody)
    return arch.body

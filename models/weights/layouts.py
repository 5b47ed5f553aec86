"""Adapts checkpoint layouts to the decoder's: other names, fused matrices, interleaved heads. One function per family.

Used by models.registry. A laid-out source presents the decoder's names and slices or reorders outputs; it copies only
those outputs and computes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trireme.model.reader import ArchSpec
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import RawMatrix, WeightSource, named_once
from trireme.topology.mesh import Span

Rows = np.ndarray  # output indices


class StoredRows(NamedTuple):
    """Outputs of a stored matrix that the decoder names separately; `stored` is relative to the layer."""

    stored: str
    total: int
    rows: Callable[[], Rows]


class LaidOutSource:
    """A WeightSource under the decoder's names. `renames` maps parts of names, `parts` maps the decoder's name in a layer to
    outputs of a fused matrix, `stacked` are vectors stored one per head, `pair_dims` (head dim, rotated dims) of q and k
    whose outputs are stored as adjacent rotary pairs."""

    def __init__(
        self,
        source: WeightSource,
        *,
        renames: dict[str, str] | None = None,
        parts: dict[str, StoredRows] | None = None,
        stacked: dict[str, str] | None = None,
        pair_dims: tuple[int, int] = (0, 0),
    ) -> None:
        self.path: Path = source.path
        self._source = source
        self._parts = parts or {}
        self._stacked = stacked or {}
        self._pair_dims = pair_dims
        self._heads: dict[str, list[str]] = {}
        shown = ((name, stored) for stored in sorted(source.names()) for name in self._shown(stored, renames or {}))
        self._name_of = named_once(shown, source.path)

    def _shown(self, stored: str, renames: dict[str, str]) -> Iterator[str]:
        """The names under which a stored tensor is presented; per-head vectors are recorded in `_heads` instead."""
        name = stored
        for old, new in renames.items():
            name = name.replace(old, new)
        stem, dot, suffix = name.rpartition(".")
        for wanted, part in self._parts.items():
            if stem.endswith("." + part.stored):
                yield stem.removesuffix(part.stored) + wanted + dot + suffix
                name = ""
        for pattern, wanted in self._stacked.items():
            before, found, _after = name.partition(pattern)
            if found:
                self._heads.setdefault(before + wanted, []).append(stored)
                name = ""
        if name:
            yield name

    def names(self) -> set[str]:
        return {*self._name_of, *self._heads}

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        """The raw matrix [n, k]: outputs of a fused matrix are sliced out, adjacent rotary pairs reordered into halves."""
        stored, part = self._name_of[name], self._part_of(name)
        if part is None:
            whole = self._source.matrix(stored, n, k)
            return whole if not self._is_paired(name) else whole._replace(raw=whole.raw[self._halves(n)])
        whole = self._source.matrix(stored, part.total, k)
        return RawMatrix(whole.kind, whole.raw[part.rows()], n, k)

    def vector(self, name: str, size: int) -> Floats:
        """The float32 vector [size], likewise; per-head vectors are concatenated."""
        if name in self._heads:
            stored = sorted(self._heads[name], key=_number_in)
            return np.concatenate([self._source.vector(each, size // len(stored)) for each in stored])
        part = self._part_of(name)
        if part is not None:
            return self._source.vector(self._name_of[name], part.total)[part.rows()]
        values = self._source.vector(self._name_of[name], size)
        return values[self._halves(size)] if self._is_paired(name) else values

    def _part_of(self, name: str) -> StoredRows | None:
        stem = name.rpartition(".")[0]
        return next((part for wanted, part in self._parts.items() if stem.endswith("." + wanted)), None)

    def _is_paired(self, name: str) -> bool:
        return self._pair_dims[0] > 0 and ".self_attn.q_" in name.replace(".k_", ".q_")

    def _halves(self, rows: int) -> Rows:
        """Output order that moves rotary pairs (0, 1), (2, 3), ... of each head into halves; other outputs stay."""
        dim, rotated = self._pair_dims
        in_head = np.concatenate((np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)))
        return (np.arange(rows // dim)[:, None] * dim + in_head).reshape(-1)


def _number_in(name: str) -> int:
    return int(name.split(".")[-2])


def _consecutive(stored: str, sizes: dict[str, int]) -> dict[str, StoredRows]:
    """Parts that are consecutive outputs of one stored matrix."""
    total, start, parts = sum(sizes.values()), 0, {}
    for name, size in sizes.items():
        parts[name] = StoredRows(stored, total, _Range(start, start + size))
        start += size
    return parts


class _Range:
    def __init__(self, start: int, stop: int) -> None:
        self._span = start, stop

    def __call__(self) -> Rows:
        return np.arange(*self._span)


class _Grouped:
    """Outputs of heads [first, last) of each group, where a group is its query heads, its key and its value."""

    def __init__(self, arch: ArchSpec, first: int, last: int) -> None:
        self._arch, self._span = arch, (first, last)

    def __call__(self) -> Rows:
        arch, dim = self._arch, self._arch.head_dim
        per_group = arch.num_heads // arch.num_kv_heads + 2
        rows = np.arange(arch.num_kv_heads * per_group * dim).reshape(arch.num_kv_heads, per_group, dim)
        return rows[:, self._span[0] : self._span[1]].reshape(-1)


def _qkv_sizes(arch: ArchSpec) -> dict[str, int]:
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}


def phi3(source: WeightSource, arch: ArchSpec) -> WeightSource:
    gate_up = {"mlp.gate_proj": arch.ffn, "mlp.up_proj": arch.ffn}
    parts = _consecutive("self_attn.qkv_proj", _qkv_sizes(arch)) | _consecutive("mlp.gate_up_proj", gate_up)
    return LaidOutSource(source, parts=parts)


def baichuan(source: WeightSource, arch: ArchSpec) -> WeightSource:
    return LaidOutSource(source, parts=_consecutive("self_attn.W_pack", _qkv_sizes(arch)))


def cohere(source: WeightSource, arch: ArchSpec) -> WeightSource:
    return LaidOutSource(source, pair_dims=(arch.head_dim, arch.rope.dim))


def stablelm(source: WeightSource, arch: ArchSpec) -> WeightSource:
    stacked = {f"self_attn.{side}_layernorm.norms.": f"self_attn.{side}_norm.weight" for side in "qk"}
    return LaidOutSource(source, stacked=stacked)


def internlm2(source: WeightSource, arch: ArchSpec) -> WeightSource:
    """InternLM2: its own names, and wqkv fused per KV head as (query heads, key, value)."""
    renames = {
        "model.tok_embeddings.": "model.embed_tokens.",
        "output.weight": "lm_head.weight",
        ".attention.wo.": ".self_attn.o_proj.",
        ".attention.wqkv.": ".self_attn.qkv_proj.",
        ".attention_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".feed_forward.w1.": ".mlp.gate_proj.",
        ".feed_forward.w3.": ".mlp.up_proj.",
        ".feed_forward.w2.": ".mlp.down_proj.",
    }
    group, total = arch.num_heads // arch.num_kv_heads, sum(_qkv_sizes(arch).values())
    spans = {"q": (0, group), "k": (group, group + 1), "v": (group + 1, group + 2)}
    parts = {
        f"self_attn.{side}_proj": StoredRows("self_attn.qkv_proj", total, _Grouped(arch, *span))
        for side, span in spans.items()
    }
    return LaidOutSource(source, renames=renames, parts=parts)


MXFP4_VALUES_PER_BLOCK = 32


def gate_up_rows(own: Span, ffn: int, *, interleaved: bool) -> np.ndarray:
    """Output indices of one rank, gates then ups, in a matrix that stores them alternating (GPT-OSS) or as halves (Llama 4)."""
    gate = np.arange(own.start, own.stop)
    return np.concatenate((2 * gate, 2 * gate + 1) if interleaved else (gate, ffn + gate))

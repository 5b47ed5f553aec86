"""One rank's shard of a model's weights under column- and row-parallel linear layers (tensor parallel on GPUs). No torch.

Between models/load and models/cuda/weights/sources: a weight requested by name and local size is sliced out of the stored
one, and nothing else is read. q, k, v, gate and up are split by outputs, o and down by inputs, embedding and head by
vocabulary; biases of all-reduced sums are on rank 0 alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from trireme.errors import ConfigError
from trireme.model.bodies import GptBody, MoeBody
from trireme.model.packed_ints import BLOCK_SIZES
from trireme.model.reader import ArchSpec
from trireme.models.weights.grouped import narrower
from trireme.models.weights.packed import BLOCKS, GROUPED, ROW_SCALE_BYTES, Floats
from trireme.models.weights.sources import RawMatrix, TensorSource, WeightSource
from trireme.topology.mesh import Mesh, Span, split_evenly, split_heads

UNITS = (
    256,
    128,
    64,
    16,
    1,
)  # of feed-forward columns, preferred by kernels and quant blocks: the largest that divides evenly


class MatrixSlice(NamedTuple):
    """A part of a stored matrix [n, k]: its `rows` (outputs) and `columns` (inputs)."""

    n: int
    k: int
    rows: Span
    columns: Span


class RankSpans:
    """The spans of heads, feed-forward columns and vocabulary of one rank of `tp`."""

    def __init__(self, arch: ArchSpec, mesh: Mesh) -> None:
        self.arch, self.rank, self.are_all = arch, mesh.tp_rank, mesh.tp == 1
        heads = [split_heads(arch.num_heads, arch.num_kv_heads, mesh.tp, rank) for rank in range(mesh.tp)]
        self.all_q = [_times(one.q, arch.head_dim) for one in heads]
        self.all_kv = [_times(one.kv, arch.head_dim) for one in heads]
        self.q, self.kv = self.all_q[mesh.tp_rank], self.all_kv[mesh.tp_rank]
        self.q_heads, self.kv_heads = heads[mesh.tp_rank].q.size, heads[mesh.tp_rank].kv.size
        self.ffn = _spans(arch.ffn, mesh.tp)[mesh.tp_rank]
        vocabulary = _spans(arch.vocab_size, mesh.tp)
        self.vocab = vocabulary[mesh.tp_rank]
        self.vocab_sizes = [span.size for span in vocabulary]

    def cut(self, name: str) -> MatrixSlice:
        """The slice of the matrix `name` that this rank holds."""
        arch = self.arch
        hidden, ffn = arch.hidden, arch.ffn
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        by_output = {
            "q_proj": (q, self.q),
            "k_proj": (kv, self.kv),
            "v_proj": (kv, self.kv),
            "gate_proj": (ffn, self.ffn),
            "up_proj": (ffn, self.ffn),
            "embed_tokens": (arch.vocab_size, self.vocab),
            "lm_head": (arch.vocab_size, self.vocab),
        }
        if isinstance(arch.body, MoeBody):
            everything = arch.body.num_experts, Span(0, arch.body.num_experts)
            by_output |= {"router": everything, "gate": everything, "w1": (ffn, self.ffn), "w3": (ffn, self.ffn)}
        by_input = {"o_proj": (q, self.q), "down_proj": (ffn, self.ffn), "w2": (ffn, self.ffn)}
        part = name.split(".")[-2]
        if part == "embed_positions":
            assert isinstance(arch.body, GptBody)
            positions = arch.body.learned_positions
            return MatrixSlice(positions, hidden, Span(0, positions), Span(0, hidden))
        if part in by_input:
            k, columns = by_input[part]
            return MatrixSlice(hidden, k, Span(0, hidden), columns)
        n, rows = by_output[part]
        return MatrixSlice(n, hidden, rows, Span(0, hidden))

    def own(self, source: WeightSource, name: str, size: int) -> Floats:
        """This rank's `size` values of the vector `name`: all of a norm, a shard of a linear bias."""
        if not name.endswith(".bias") or "norm" in name:
            return source.vector(name, size)
        cut = self.cut(name)
        whole = source.vector(name, cut.n)
        if cut.columns.size < cut.k and self.rank > 0:
            return np.zeros_like(whole)
        return whole[cut.rows.start : cut.rows.stop]


class ShardSource:
    """A WeightSource that presents one rank's shard of another."""

    def __init__(self, source: WeightSource, shares: RankSpans) -> None:
        self.path: Path = source.path
        self._source, self._shares = source, shares

    def names(self) -> set[str]:
        return self._source.names()

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        cut = self._shares.cut(name)
        assert (cut.rows.size, cut.columns.size) == (n, k), name
        found = self._source.matrix(name, cut.n, cut.k).rows(cut.rows)
        return found if k == cut.k else columns_of(found, cut.columns)

    def vector(self, name: str, size: int) -> Floats:
        return self._shares.own(self._source, name, size)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Any:
        """The whole tensor: the caller slices it."""
        return cast(TensorSource, self._source).tensor(name, shape)


def columns_of(matrix: RawMatrix, span: Span) -> RawMatrix:
    """Slices a matrix by inputs. Raises ConfigError if the span splits a quant block."""
    values, nbytes = BLOCKS[matrix.kind]
    if matrix.kind == "FP8_BLOCKS" and (span.start % values or span.stop % values):
        return columns_of(matrix.as_kind("BF16"), span)
    if matrix.kind in GROUPED and (span.start % values or span.stop % values):
        fitting = [size for size in BLOCK_SIZES if size < values and not (span.start % size or span.stop % size)]
        if fitting:
            return columns_of(RawMatrix(*narrower(matrix.kind, matrix.raw, fitting[0]), matrix.n, matrix.k), span)
    if span.start % values or span.stop % values:
        raise ConfigError(
            f"rows of {matrix.k} values in blocks of {values} ({matrix.kind}) cannot be cut at {span.start} and {span.stop}",
            hint="a smaller --tp",
        )
    first = ROW_SCALE_BYTES.get(matrix.kind, 0)
    part = matrix.raw[:, first + span.start // values * nbytes : first + span.stop // values * nbytes]
    raw = np.concatenate((matrix.raw[:, :first], part), axis=1) if first else part
    return RawMatrix(matrix.kind, raw, matrix.n, span.size)


def _times(span: Span, factor: int) -> Span:
    return Span(span.start * factor, span.stop * factor)


def _spans(total: int, parts: int) -> list[Span]:
    """Spans of all ranks in multiples of the largest unit that divides evenly; else as even as possible."""
    even = [unit for unit in UNITS if total % (unit * parts) == 0]
    possible = [unit for unit in UNITS if total % unit == 0 and total // unit >= parts]
    unit = (even or possible or [1])[0]
    return [split_evenly(total, parts, part, unit=unit) for part in range(parts)]

"""Parts shared by the bodies models/cpu/{decoder,gpt,moe}.py: slicing a rank's shard, gathering column shards, and both ends of a
model (embedding; final norm and head). Knows no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trireme.model.reader import ArchSpec
from trireme.models.cpu.embedding import Embedding
from trireme.models.cpu.linear import Linear
from trireme.models.cpu.packed_linear import PackedLinear
from trireme.models.cpu.tensors import tensor_from_stored
from trireme.models.forward import ForwardBatch, Group
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import RawMatrix, SafetensorsSource, named_once
from trireme.topology.mesh import HeadSpans, Mesh, Span, split_evenly, split_heads

Norm = Callable[[Tensor], Tensor]


class PrefixedSource:
    """A checkpoint presented without a prefix that some or all of its names have; `renamed` is (stored name, presented
    name), and names that start with one of `ignored` are hidden."""

    def __init__(
        self,
        source: SafetensorsSource,
        prefix: str,
        *,
        renamed: tuple[str, str] = ("", ""),
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.path: Path = source.path
        self._source = source
        stored, seen = renamed
        shown = ((seen if name == stored else name.removeprefix(prefix), name) for name in sorted(source.names()))
        self._name_of = named_once((pair for pair in shown if not pair[1].startswith(ignored)), source.path)

    def names(self) -> set[str]:
        return set(self._name_of)

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        return self._source.matrix(self._name_of[name], n, k)

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(self._name_of[name], size)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A torch tensor of any rank, in the stored dtype."""
        return tensor_from_stored(self._source.tensor(self._name_of[name], shape))


class RankWeights:
    """Loads this rank's shard of every weight. As in the decoder, every matrix is split by outputs, so TP is bit-exact: each
    output is one sum in one order."""

    def __init__(self, arch: ArchSpec, mesh: Mesh, source: PrefixedSource, dense: str | None) -> None:
        self.arch = arch
        self.source = source
        self._mesh = mesh
        self._dense = dense

    @property
    def rank(self) -> int:
        return self._mesh.tp_rank

    def heads(self) -> list[HeadSpans]:
        """Query and KV heads of every rank."""
        tp = self._mesh.tp
        return [split_heads(self.arch.num_heads, self.arch.num_kv_heads, tp, rank) for rank in range(tp)]

    def spans(self, total: int) -> list[Span]:
        """Output spans of every rank, in whole tiles of 16 if possible."""
        tp = self._mesh.tp
        unit = 16 if total % 16 == 0 and total // 16 >= tp else 1
        return [split_evenly(total, tp, rank, unit=unit) for rank in range(tp)]

    def columns(self, spans: list[Span]) -> ColumnShard:
        return ColumnShard([span.size for span in spans], self.rank)

    def packed(self, matrices: list[RawMatrix], biases: list[Tensor] | None = None) -> Linear:
        """A linear layer over matrices concatenated along their outputs, each already sliced to this rank's."""
        vectors = None if biases is None else [bias.numpy() for bias in biases]
        return Linear(PackedLinear([matrix.computable(self._dense) for matrix in matrices], vectors))

    def vector(self, name: str, size: int) -> Tensor:
        """A float32 vector of the checkpoint."""
        return torch.from_numpy(self.source.vector(name, size))

    def rows(self, name: str, n: int, k: int, *, bias: bool = False) -> Linear:
        """A linear layer over this rank's outputs of one matrix [n, k] (a Hugging Face name without .weight)."""
        own = self.spans(n)[self.rank]
        biases = [self.vector(name + ".bias", n)[own.start : own.stop]] if bias else None
        return self.packed([self.source.matrix(name + ".weight", n, k).rows(own)], biases)


class ColumnShard:
    """Columns of an activation that is sharded over the ranks of a stage."""

    def __init__(self, sizes: list[int], rank: int) -> None:
        self.sizes = sizes
        self.own = sizes[rank]

    def gather(self, part: Tensor, group: Group) -> Tensor:
        """All-gathers this rank's columns to [T, sum(sizes)]."""
        return part if group.size == 1 else group.all_gather(part, self.sizes)


def dense_tensor(matrix: RawMatrix) -> Tensor:
    """A dense raw matrix as a torch tensor [n, k] in the stored dtype; a copy."""
    dtypes = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    return torch.from_numpy(matrix.raw.copy().reshape(-1)).view(dtypes[matrix.kind]).view(matrix.n, matrix.k)


class EmbedHead:
    """Embedding on the first stage, final norm and head on the last, transfer of hidden states between stages; tied ends
    share one matrix."""

    def __init__(self, cut: RankWeights, mesh: Mesh, group: Group, names: tuple[str, str], norm: Norm | None) -> None:
        """`names`: of the embedding and the head. `norm` is required on the last stage."""
        arch = cut.arch
        embed, head = names
        self._group = group
        self._hidden = arch.hidden
        self._vocab_size = arch.vocab_size
        self._vocab = cut.columns(cut.spans(arch.vocab_size))
        self._head: Linear | None = None
        self._embedding: Embedding | None = None
        self._norm = norm
        self.nbytes = 0
        if mesh.is_last_stage:
            self._head = cut.rows(embed if arch.tie_embeddings else head, arch.vocab_size, arch.hidden)
            self.nbytes += self._head.nbytes
        if mesh.is_first_stage:
            shared = self._head if arch.tie_embeddings else None
            matrix = shared or cut.rows(embed, arch.vocab_size, arch.hidden)
            self._embedding = Embedding(matrix.weights[0], cut.spans(arch.vocab_size)[cut.rank], group)
            self.nbytes += 0 if shared else matrix.nbytes

    @property
    def is_first(self) -> bool:
        return self._embedding is not None

    def begin(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [T, H]: token embeddings on the first stage, else received from the previous one."""
        shape = (batch.token_ids.shape[0], self._hidden)
        if self._embedding is None:
            return self._group.recv_prev(shape, torch.float32)
        return self._embedding(batch.token_ids, torch.empty(shape))

    def finish(self, hidden: Tensor, index: Tensor) -> Tensor | None:
        """Logits [S, V] of the tokens `index` on the last stage; else sends the hidden states and returns None."""
        if self._head is None or self._norm is None:
            self._group.send_next(hidden)
            return None
        if index.shape[0] == 0:
            return torch.empty(0, self._vocab_size)
        rows = hidden.index_select(0, index)
        logits = torch.empty(index.shape[0], self._head.n)
        self._head(self._norm(rows), logits)
        return self._vocab.gather(logits, self._group)


def identity_table(num_positions: int) -> Tensor:
    """Identity table [num_positions, 2] for ops.rope_and_cache: cosine 1, sine 0 of a single pair."""
    return torch.tensor([1.0, 0.0]).repeat(num_positions, 1)

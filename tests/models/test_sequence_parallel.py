"""Sequence parallelism: the GPU's body with a part of the hidden states on each rank gives what it gives with all of them, over the
CPU's shared-memory collectives and between threads that spoil whatever a rank may not rely on.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import test_cuda_spread as spread
from tests.models.test_cuda_spread import BLOCK, CPU, Meeting, OnCpu, ThreadGroup, stored
from tests.models.test_shards import Stored, arch_of
from tests.unit.test_gpu_choice import BOX, resolved
from tests.unit.test_resolve import LAPTOP
from trireme.errors import ConfigError
from trireme.machine.step_sizes import MOST_CAPTURED
from trireme.model.bodies import GptBody
from trireme.model.spec import ArchSpec
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.attention.prefill_plan import PIECES
from trireme.models.cuda.decoder import CudaBatch, CudaModel
from trireme.models.cuda.host_adapter import upload
from trireme.models.cuda.layers.linear import Fp8Linear
from trireme.models.cuda.sequence_parallel import SPLIT_FROM, SplitRows, WholeRows
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.forward import HostBatch
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.arena import create_arena
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.shm import ShmGroup

plain_ops = spread.plain_ops
SHAPES = [(2, 1), (3, 1), (4, 1), (2, 2)]
FIT = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 8, "vocab_size": 52}  # 2, 3 and 4 ranks have as much each
torch.set_num_threads(1)
ARCHS: dict[str, dict[str, Any]] = {
    "biases": {"tie_embeddings": False},
    "post-norms": {"norm_placement": "both"},
    "only post-norms": {"norm_placement": "post"},
    "scaled": {"residual_scale": 0.5},
    "one norm for both": {"body": GptBody(parallel=True, norms="shared"), "tie_embeddings": True},
    "a norm each": {"body": GptBody(parallel=True, learned_positions=64), "tie_embeddings": False},
    "norms of whole q": {"qk_norm": True, "qk_norm_kind": "wide", "tie_embeddings": False},
}
MAX_LEN = 32
Chunk = tuple[int, int, int]
"""Row, tokens computed before, tokens of this step."""
PLAN: list[list[Chunk]] = [
    [(0, 0, 1), (1, 0, 7), (2, 0, 5)],  # 13 tokens, a prompt of one of them, one that goes on
    [(0, 1, 1), (1, 7, 1), (2, 5, 6), (3, 0, 3)],  # beside decodes
    [(4, 0, 1)],  # a prompt of one token alone
    [(row, start, 1) for row, start in enumerate((2, 8, 11, 3, 1))],
    [(5, 0, 2)],  # fewer tokens than ranks
    [(1, 9, 3), (5, 2, 2)],
    [(row, start, 1) for row, start in enumerate((3, 12, 12, 4, 2, 4))],
]
DECODES_ALONE = (2, 3, 6)  # steps in which every row has one token


def batch_of(chunks: list[Chunk]) -> CudaBatch:
    """Rows have blocks of their own; every token's logits are wanted."""
    counts = np.array([count for *_, count in chunks], np.int32)
    rows = np.repeat([row for row, *_ in chunks], counts)
    positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
    table = (np.arange(6 * MAX_LEN // BLOCK).reshape(6, -1)).astype(np.int32)
    batch = HostBatch(
        token_ids=((7 * rows + 11 * positions) % 50).astype(np.int32),
        positions=positions.astype(np.int32),
        slots=(table[rows, positions // BLOCK] * BLOCK + positions % BLOCK).astype(np.int32),
        query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_len=np.array([start + count for _, start, count in chunks], np.int32),
        block_table=table[[row for row, *_ in chunks]],
        logits_index=np.arange(counts.sum(), dtype=np.int32),
        choices=0 * counts,
        num_prompt=0 * counts,
    )
    found = upload(batch, rules=PIECES, device="cpu")
    found.context_len = found.context_len[: found.num_decodes]  # (the kernel's twin takes as many as there are)
    return found


class SpoilingGroup(ThreadGroup):
    """A rank keeps nothing but its own part of a sum, and finds nothing but its own where it gathers."""

    splits = 0  # sums of which each rank kept a part

    def reduce_rows(self, x: Tensor) -> Tensor:
        self.splits += 1
        parts = torch.stack(self._parts(x)).sum(0).view(self.size, -1, *x.shape[1:])
        x.fill_(float("nan"))
        own = x.view(parts.shape)[self.rank]
        return own.copy_(parts[self.rank])

    def gather_rows(self, x: Tensor) -> Tensor:
        own = [part.view(self.size, -1)[rank] for rank, part in enumerate(self._parts(x.view(torch.uint8)))]
        x.view(torch.uint8).view(self.size, -1).copy_(torch.stack(own))
        return x


class ShmRows(ShmGroup):
    """The CPU's collectives, which know columns: rows of equal parts are columns of one long row."""

    def reduce_rows(self, x: Tensor) -> Tensor:
        own = x.view(self.size, -1, *x.shape[1:])[self.rank]
        return own.copy_(self.reduce_scatter(x.view(1, -1), [own.numel()] * self.size).view(own.shape))

    def gather_rows(self, x: Tensor) -> Tensor:
        parts = x.view(torch.uint8).view(self.size, -1)
        width = parts.shape[1]
        whole = self.all_gather(parts[self.rank].view(1, width), [width] * self.size)
        parts.copy_(whole.view(self.size, width))
        return x


Source = Callable[[RankSpans], Any]


def logits_of(
    arch: ArchSpec,
    shape: tuple[int, int],
    split_from: int,
    group_of: Callable[[Mesh], Any],
    source_of: Source | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Of the steps of PLAN; all ranks of the last stage agree to the bit. Steps of decodes alone sum no parts."""
    tp, pp = shape
    mesh, make_source = Mesh(1, pp, tp), source_of or stored(arch)

    def rank(worker: int) -> list[Tensor]:
        place = mesh.at_worker(worker)
        with OnCpu(), torch.inference_mode():
            group = group_of(place) if mesh.num_workers > 1 else None
            model = CudaModel(
                arch,
                make_source(RankSpans(arch, place)),
                dtype,
                max_len=MAX_LEN,
                progress=lambda *_: None,
                place=(place, group),
                split_from=split_from,
            )
            kv = model.allocate_kv(6 * MAX_LEN // BLOCK, BLOCK)
            found = []
            for step, chunks in enumerate(PLAN):
                before = getattr(group, "splits", 0)
                found.append(model.run(batch_of(chunks), kv).clone())
                if isinstance(group, SpoilingGroup):
                    is_split = 0 < split_from <= len(found[-1]) and step not in DECODES_ALONE
                    assert (group.splits > before) == is_split
            return found

    with ThreadPoolExecutor(mesh.num_workers) as pool:
        found = list(pool.map(rank, range(mesh.num_workers)))
    for other in found[-tp:-1]:
        assert_equal(other, found[-1])
    return found[-1]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def tokens_of(logits: list[Tensor]) -> list[int]:
    return [token for step in logits for token in step.argmax(-1).tolist()]


def between_threads(shape: tuple[int, int]) -> Callable[[Mesh], Any]:
    meeting = Meeting(Mesh(1, shape[1], shape[0]))
    return lambda place: SpoilingGroup(place, meeting)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "tp{}pp{}".format(*shape))
@pytest.mark.parametrize("changes", ARCHS.values(), ids=ARCHS)
def test_parts_give_the_bits_of_whole_rows_and_the_tokens_of_one_card(
    shape: tuple[int, int], changes: dict[str, Any]
) -> None:
    """Over all of them the last parts have rows that are nobody's."""
    arch = arch_of(**FIT, **changes)
    alone = logits_of(arch, (1, 1), 1, between_threads((1, 1)))
    whole = logits_of(arch, shape, 0, between_threads(shape))
    assert_equal(logits_of(arch, shape, 1, between_threads(shape)), whole)
    assert_equal(logits_of(arch, shape, 12, between_threads(shape)), whole)
    assert tokens_of(whole) == tokens_of(alone)
    for a, b in zip(whole, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("tp", [2, 4])
def test_over_shared_memory_the_tokens_are_those_of_one_card(tp: int) -> None:
    arch, mesh = arch_of(**FIT, tie_embeddings=False), Mesh(1, 1, tp)
    alone = logits_of(arch, (1, 1), 1, between_threads((1, 1)))
    found = []
    for split_from in (0, 1):
        arena = create_arena(mesh, 64, arch.hidden, arch.vocab_size)
        try:
            found.append(logits_of(arch, (tp, 1), split_from, lambda place, path=arena.path: ShmRows(path, place)))  # type: ignore[misc]
        finally:
            arena.close()
    assert_equal(*found)
    assert tokens_of(found[1]) == tokens_of(alone)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_float8_inputs_travel_with_their_scales(tp: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and scales of what is normed, for products that apply the scales and for those that leave them to their readers."""
    monkeypatch.setattr(cuda_ops, "quantize_rows", cuda_reference.quantize_rows_reference)
    monkeypatch.setattr("trireme.models.cuda.layers.linear._EXACT_ROWS", 0)
    left: list[bool] = []
    unscaled = Fp8Linear.unscaled

    def counted(self: Fp8Linear, x: Tensor, scale: Tensor, out: Tensor) -> Any:
        assert x.dtype == torch.float8_e4m3fn
        assert x.shape[0] == scale.shape[0] == out.shape[0]
        scales = unscaled(self, x, scale, out)
        left.append(scales is not None)
        return scales

    monkeypatch.setattr(Fp8Linear, "unscaled", counted)
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), biased)
    sizes = {"hidden": 128, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "ffn": 256, "vocab_size": 64}
    arch = arch_of(tie_embeddings=True, **sizes, **biases)

    def source(shares: RankSpans) -> Any:
        return own_weights(Stored(), torch.bfloat16, CPU, shares, scheme="fp8")

    whole, parts = (
        logits_of(arch, (tp, 1), split_from, between_threads((tp, 1)), source, torch.bfloat16) for split_from in (0, 1)
    )
    assert_equal(parts, whole)
    assert all(bool(step.isfinite().all()) for step in whole)
    assert set(left) == {not biased}


def test_no_graph_is_as_long_as_what_is_split() -> None:
    assert MOST_CAPTURED < SPLIT_FROM


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num", [1, 2, 7, 12])
def test_parts_cover_every_row_once(num: int, size: int) -> None:
    class Ranked:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, size

    all_rows = [SplitRows(num, Ranked(rank)) for rank in range(size)]  # type: ignore[arg-type]
    total = all_rows[0].total
    assert num <= total < num + size
    assert torch.equal(torch.cat([rows.own(torch.arange(total)) for rows in all_rows]), torch.arange(total))
    assert WholeRows(num, Ranked(0)).total == num  # type: ignore[arg-type]


def test_the_option_is_for_several_gpus_and_says_what_it_does() -> None:
    box = msgspec.structs.replace(BOX, num_gpus=2)

    def decided(**flags: Any) -> str:
        _, decisions = resolved(device=box, sequence_parallel=True, **flags)
        return next(choice.value for choice in decisions if choice.what == "sequence-parallel")

    assert decided(tp=2) == "2 parts"
    assert decided() == "off"
    with pytest.raises(ConfigError, match="over GPUs"):
        resolved(device=LAPTOP, sequence_parallel=True)

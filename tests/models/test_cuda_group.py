"""How GPU ranks find each other and what they fall back on, without a GPU: ranks in threads, peer memory and NCCL as stand-ins."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.models.test_cuda_spread import PATIENCE_S, Meeting, ThreadGroup
from trireme.errors import CollectiveError
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import rendezvous as meeting
from trireme.workers.collectives.allreduce_algos import AllReduceAlgo
from trireme.workers.collectives.cuda import CudaGroup
from trireme.workers.collectives.nccl import ID_BYTES


class Host(ThreadGroup):
    """ShmGroup between threads."""

    aborted = False

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return x.copy_(self._parts(x)[root])

    def barrier(self) -> None:
        self._meeting.stages[self._mesh.pp_rank].wait(PATIENCE_S)

    def abort(self) -> None:
        self.aborted = True


class Peers:
    """PeerMemory of ranks that are not in `unable`."""

    HANDLE_BYTES = 64
    unable: tuple[int, ...] = ()

    def __init__(self, rank: int, size: int, **sizes: int) -> None:
        self.rank, self.size, self.handles, self.aborts, self.trouble = rank, size, list[bytes](), 0, ""
        if rank in self.unable:
            raise CollectiveError("no memory for collectives")

    def handle(self) -> bytes:
        return bytes([self.rank + 1]) * 64

    def open(self, handles: list[bytes]) -> None:
        self.handles = handles

    def failure(self) -> str:
        return self.trouble

    def abort(self) -> None:
        self.aborts += 1


class Nccl:
    """One communicator; ranks with the same id are together, and gather through the host's meeting."""

    def __init__(self, library: Any, unique_id: bytes, rank: int, size: int, *, timeout_s: float) -> None:
        self.id, self.rank, self.size, self.aborts = unique_id, rank, size, 0
        self.gather: Callable[[Tensor], list[Tensor]] | None = None

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.gather is not None
        return out.copy_(torch.stack(self.gather(x)))

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Tensor:
        assert self.gather is not None
        return out.copy_(torch.stack(self.gather(x)).sum(0).view(self.size, -1)[self.rank].view(out.shape))

    def failure(self) -> str:
        return ""

    def abort(self) -> None:
        self.aborts += 1


class Library:
    ids = itertools.count(1)

    def unique_id(self) -> bytes:
        return bytes([next(self.ids) % 256]) * ID_BYTES


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "PeerMemory", Peers)
    monkeypatch.setattr(meeting, "NcclComm", Nccl)
    monkeypatch.setattr(meeting, "load_nccl", Library)


def meet(tp: int, pp: int, num_gpus: int) -> list[Any]:
    mesh = Mesh(1, pp, tp)
    place_to_meet = Meeting(mesh)

    def one(worker: int) -> CudaGroup:
        place = mesh.at_worker(worker)
        group = CudaGroup(place, cast(Any, Host(place, place_to_meet)), num_gpus, gathered_bytes=1000)
        if group._nccl is not None:
            cast(Any, group._nccl).gather = cast(Any, group._host)._parts
        return group

    with ThreadPoolExecutor(mesh.num_workers) as pool:
        groups = list(pool.map(one, range(mesh.num_workers)))
    for group in groups:
        group.close()
    return groups


def test_ranks_with_cards_of_their_own_have_peer_memory_and_one_communicator() -> None:
    groups = meet(2, 1, 2)
    assert [group._peers.handles for group in groups] == [[b"\1" * 64, b"\2" * 64]] * 2
    assert groups[0]._nccl.id == groups[1]._nccl.id
    assert [(group._nccl.rank, group._nccl.size) for group in groups] == [(0, 2), (1, 2)]
    assert all(group.can_be_captured and group.ranges[-1].algo is AllReduceAlgo.NCCL for group in groups)


def test_ranks_that_share_a_card_do_without_nccl() -> None:
    groups = meet(2, 1, 1)
    assert all(group._nccl is None and group._peers is not None and group.can_be_captured for group in groups)
    assert all(group.ranges[-1].algo is AllReduceAlgo.TWO_SHOT for group in groups)


@pytest.mark.parametrize("num_gpus", [2, 1], ids=["nccl", "peer memory"])
def test_rows_are_summed_where_they_are_kept_and_gathered_again(num_gpus: int) -> None:
    """Of any type that travels; peer memory takes a part at a time."""
    groups = meet(2, 1, num_gpus)
    sums = torch.arange(24.0).view(6, 4)

    def one(group: Any) -> list[Tensor]:
        group._staged = 8
        if group._nccl is None:  # (its stand-in has no memory: sums and gathers go through the host's meeting)
            group._reduce = lambda x, algo: x.copy_(torch.stack(group._host._parts(x)).sum(0))
            group._peers.all_gather = lambda x, sizes: torch.cat(group._host._parts(x), -1)
        x = sums * (0.25 + 0.5 * group.rank)
        own = group.reduce_rows(x)
        assert own.data_ptr() == x[3 * group.rank].data_ptr()
        found = [group.gather_rows(x)]
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            kept = torch.zeros(6, 4).to(dtype)
            kept[3 * group.rank :][:3].copy_(sums[3 * group.rank :][:3])
            found.append(group.gather_rows(kept).float())
        scales = torch.where(torch.arange(6) // 3 == group.rank, sums[:, 0], -1.0)
        return [*found, group.gather_rows(scales)]

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(one, groups):
            rounded = [sums.to(dtype).float() for dtype in (torch.float8_e4m3fn, torch.bfloat16)]
            for a, b in zip(found, [sums, *rounded, sums[:, 0]], strict=True):
                assert torch.equal(a, b)


def test_one_rank_without_peer_memory_is_enough_to_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "unable", (1,))
    groups = meet(2, 1, 2)
    assert all(group._peers is None and group._nccl is not None for group in groups)
    assert [group.measure() for group in groups] == [
        ("nccl always", "no peer memory: another rank has none"),
        ("nccl always", "no peer memory: no memory for collectives"),
    ]


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_without_peer_memory_and_nccl_torch_is_the_last_resort(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, tmp_path: Path
) -> None:
    monkeypatch.setattr(Peers, "unable", (1,))
    monkeypatch.setattr(Library, "unique_id", no_nccl)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    groups = meet(2, 1, num_gpus)
    assert [*tmp_path.iterdir()] == []
    assert not any(group.can_be_captured or group._peers or group._nccl for group in groups)
    lacks = "ranks share a GPU" if num_gpus == 1 else "no interface"
    assert [group._lacks() for group in groups] == [
        f"no peer memory: another rank has none; no NCCL: {lacks}",
        f"no peer memory: no memory for collectives; no NCCL: {lacks}",
    ]
    parts = [torch.arange(24.0).view(6, 4) * (rank + 1) for rank in range(2)]

    def one(group: Any) -> list[Tensor]:
        own = parts[group.rank]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "_staged", 16)
            return [
                group.all_reduce(own[:, :3].bfloat16()).float(),
                group.all_gather(own[:, : 3 - group.rank], [3, 2]),
                group.reduce_rows(own.clone()),
                group.gather_rows(own.clone()),
            ]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, groups))
    whole = torch.cat([parts[0][:3], parts[1][3:]])
    for rank, (summed, columns, rows, gathered) in enumerate(found):
        assert torch.equal(summed, 3 * parts[0][:, :3])
        assert torch.equal(columns, torch.cat([parts[0][:, :3], parts[1][:, :2]], 1))
        assert torch.equal(rows, 3 * parts[0][3 * rank :][:3])
        assert torch.equal(gathered, whole)
    monkeypatch.setattr(meeting, "lacks_torch", lambda: "torch was built without gloo")
    with pytest.raises(
        CollectiveError, match="do not reach each other: no peer memory: .*; no torch.distributed: torch was"
    ):
        meet(2, 1, num_gpus)


def test_one_rank_whose_communicator_fails_takes_nccl_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(library: Any, unique_id: bytes, rank: int, size: int, *, timeout_s: float) -> Nccl:
        made.append(Nccl(library, unique_id, rank, size, timeout_s=timeout_s))
        if rank:
            raise CollectiveError("unhandled system error")
        return made[-1]

    made: list[Nccl] = []
    monkeypatch.setattr(meeting, "NcclComm", refuse)
    groups = meet(2, 1, 2)
    assert all(group._nccl is None and group._peers is not None and group.can_be_captured for group in groups)
    assert [comm.aborts for comm in made if comm.rank == 0] == [1]
    assert [group.measure().why for group in groups] == [
        "no NCCL: another rank has none",
        "no NCCL: unhandled system error",
    ]


def no_nccl(library: Library) -> bytes:
    raise CollectiveError("no interface")


def test_stages_without_nccl_pass_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "unique_id", no_nccl)
    first, last = meet(1, 2, 2)
    assert not first.can_be_captured
    assert not last.can_be_captured
    sent = torch.randn(3, 5).bfloat16()
    first.send_next(sent)
    assert torch.equal(last.recv_into(torch.empty(3, 5, dtype=torch.bfloat16)), sent)


def test_stages_have_a_communicator_for_each_pair_of_neighbours() -> None:
    groups = meet(1, 3, 3)
    assert [group._behind and group._behind.id for group in groups[:2]] == [g._before.id for g in groups[1:]]
    assert groups[0]._behind.id != groups[1]._behind.id
    assert (groups[0]._before, groups[2]._behind) == (None, None)
    assert all(group.can_be_captured for group in groups)


def test_stages_on_one_card_pass_through_the_host() -> None:
    first, last = meet(1, 2, 1)
    assert not first.can_be_captured
    assert not last.can_be_captured
    sent = torch.randn(3, 5).bfloat16()
    first.send_next(sent)
    found = last.recv_into(torch.empty(3, 5, dtype=torch.bfloat16))
    assert torch.equal(found, sent)


def test_columns_of_uneven_widths_are_gathered_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peers, "unable", (0,))
    groups = meet(2, 1, 2)
    parts = [torch.randn(4, 3), torch.randn(4, 2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda group: group.all_gather(parts[group.rank], [3, 2]), groups))
    assert all(torch.equal(one, torch.cat(parts, 1)) for one in found)
    with pytest.raises(CollectiveError, match="3 columns were expected"):
        groups[0].all_gather(parts[1], [3, 2])


def test_ranks_agree_on_the_times_of_the_slowest() -> None:
    groups = meet(2, 1, 2)
    times = [
        {8192: {AllReduceAlgo.PUSHED: 3.0, AllReduceAlgo.NCCL: 9.0}},
        {8192: {AllReduceAlgo.PUSHED: 10.0, AllReduceAlgo.NCCL: 8.0}},
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda group: group._agreed(times[group.rank]), groups))
    assert found == [{8192: {AllReduceAlgo.PUSHED: 10.0, AllReduceAlgo.NCCL: 9.0}}] * 2


def test_trouble_of_a_kernel_is_an_error_and_ends_everything() -> None:
    group = meet(2, 1, 2)[0]
    group.check()
    group._peers.trouble = "another rank did not take part in a sum"
    with pytest.raises(CollectiveError, match="rank 0: another rank did not take part"):
        group.check()
    assert (group._peers.aborts, group._nccl.aborts, group._host.aborted) == (1, 1, True)

"""Collectives between the GPUs of one engine on one host: peer memory for small messages, NCCL for large ones and between stages.

Implements models.forward.Group over tensors on the current device; all calls launch on the current stream and can be captured in a
graph (but where ranks share a card, stages meet through the host). The ranks find each other over the engine's arena. All ranks get
the same bits. A rank that fails, stops or falls silent makes `check` raise CollectiveError within 15 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.mesh import Mesh
from workers.collectives.nccl import ID_BYTES, NcclComm, load_nccl
from workers.collectives.peer import PeerMemory
from workers.collectives.shm import ShmGroup
from workers.collectives.timing import time_ways
from workers.collectives.watch import Watch
from workers.collectives.ways import (
    PUSHED_BYTES,
    STAGED_BYTES,
    TRIED,
    Way,
    default_steps,
    describe,
    steps_from,
    usable,
    way_of,
)

MEET_S = 120.0  # ranks of one engine start at about the same time


class CudaGroup:
    """The ranks of one stage, and its neighbour stages. All ranks make the same calls in the same order, from one thread.

    `host` connects them while they start. `num_cards` are the GPUs of this host, in the order of Mesh.card. `gathered_bytes` is
    what a rank contributes to the largest all_gather; larger ones pass in pieces.
    """

    def __init__(
        self, mesh: Mesh, host: ShmGroup, num_cards: int, *, gathered_bytes: int = 0, timeout_s: float = MEET_S
    ) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp
        self._mesh, self._host, self._num_cards = mesh, host, num_cards
        self._staged = min(max(STAGED_BYTES, _rounded(gathered_bytes)), 8 * STAGED_BYTES)
        self._nccl: NcclComm | None = None
        self._peers: PeerMemory | None = None
        self._before: NcclComm | None = None  # with the stage before this one, and the one behind it
        self._behind: NcclComm | None = None
        self.watch = Watch(self._failure, self.abort)
        self.watch.start()
        with self.watch.guard(timeout_s):
            self._meet(timeout_s)
        self.ways = default_steps(PUSHED_BYTES, self._staged, has_nccl=self._nccl is not None)

    # ------------------------------------------------------------ start

    @property
    def can_be_captured(self) -> bool:
        """Whether everything here may be part of a CUDA graph: not what passes through the host."""
        mesh = self._mesh
        return (mesh.is_first_stage or self._before is not None) and (mesh.is_last_stage or self._behind is not None)

    def _meet(self, timeout_s: float) -> None:
        mesh = self._mesh
        if self.size > 1:
            self._open_peers()
            if len(self._cards(mesh.tp_group())) == self.size:
                self._nccl = NcclComm(load_nccl(), self._shared_id(), self.rank, self.size, timeout_s=timeout_s)
            if self._peers is None and self._nccl is None:
                raise CollectiveError("the GPUs of this engine reach each other neither by peer memory nor by NCCL")
        if not mesh.is_first_stage and len(self._cards([mesh.worker - mesh.tp, mesh.worker])) == 2:
            unique_id = bytes(self._host.recv_prev((ID_BYTES,), torch.uint8).tolist())
            self._before = NcclComm(load_nccl(), unique_id, 1, 2, timeout_s=timeout_s)
        if not mesh.is_last_stage and len(self._cards([mesh.worker, mesh.worker + mesh.tp])) == 2:
            unique_id = load_nccl().unique_id()
            self._host.send_next(torch.frombuffer(bytearray(unique_id), dtype=torch.uint8))
            self._behind = NcclComm(load_nccl(), unique_id, 0, 2, timeout_s=timeout_s)

    def _cards(self, workers: list[int]) -> set[int]:
        return {self._mesh.at_worker(worker).card(self._num_cards) for worker in workers}

    def _open_peers(self) -> None:
        """Peer memory, if every rank can have it."""
        peers: PeerMemory | None = None
        handle = torch.zeros(PeerMemory.HANDLE_BYTES, dtype=torch.uint8)
        try:
            peers = PeerMemory(self.rank, self.size, pushed_bytes=PUSHED_BYTES, staged_bytes=self._staged)
            handle = torch.frombuffer(bytearray(peers.handle()), dtype=torch.uint8)
        except CollectiveError:
            peers = None
        handles = self._host.all_gather(handle, [handle.numel()] * self.size).view(self.size, -1)
        is_open = peers is not None and all(bool(one.any()) for one in handles)
        try:
            if peers is not None and is_open:
                peers.open([bytes(one.tolist()) for one in handles])
        except CollectiveError:
            is_open = False
        open_everywhere = self._host.all_gather(torch.tensor([int(is_open)]), [1] * self.size)
        self._peers = peers if bool(open_everywhere.all()) else None

    def _shared_id(self) -> bytes:
        """A unique id of rank 0."""
        made = load_nccl().unique_id() if self.rank == 0 else bytes(ID_BYTES)
        held = torch.frombuffer(bytearray(made), dtype=torch.uint8)
        return bytes(self._host.broadcast(held).tolist())

    def measure(self) -> str:
        """Times every way once, and takes the fastest for each size; all ranks call it together. Says what was chosen."""
        if self.size == 1:
            return "none needed"
        if self._nccl is not None and self._peers is not None:
            with self.watch.guard(MEET_S):
                self.barrier()
                self.ways = steps_from(self._agreed({size: dict(self._times(size)) for size in TRIED}))
        return describe(self.ways)

    def _times(self, size: int) -> Iterator[tuple[Way, float]]:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        for way in usable(size, pushed=PUSHED_BYTES, staged=self._staged, has_peers=True, has_nccl=True):
            yield way, time_ways(lambda way=way: self._reduce(x, way))  # type: ignore[misc]

    def _agreed(self, times: dict[int, dict[Way, float]]) -> dict[int, dict[Way, float]]:
        """The times of the slowest rank, so that all choose alike."""
        mine = torch.tensor([taken for of_size in times.values() for taken in of_size.values()])
        slowest = self._host.all_gather(mine, [mine.numel()] * self.size).view(self.size, -1).amax(0).tolist()
        agreed = iter(slowest)
        return {size: {way: next(agreed) for way in of_size} for size, of_size in times.items()}

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; the same bits everywhere."""
        if self.size == 1 or x.numel() == 0:
            return x
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        if x.nbytes % 16 and self._nccl is None:
            padded = torch.nn.functional.pad(x.view(-1), (0, -x.numel() % 16))
            return x.copy_(self.all_reduce(padded)[: x.numel()].view(x.shape))
        return self._reduce(x, Way.NCCL if x.nbytes % 16 else way_of(self.ways, x.nbytes))

    def _reduce(self, x: Tensor, way: Way) -> Tensor:
        if way is Way.NCCL or self._peers is None:
            assert self._nccl is not None
            return self._nccl.all_reduce(x)
        return self._peers.all_reduce(x, way)

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate along the last dim; rank i contributes sizes[i] columns."""
        if self.size == 1:
            return x
        if x.shape[-1] != sizes[self.rank]:
            raise CollectiveError(f"{sizes[self.rank]} columns were expected, got shape {tuple(x.shape)}")
        rows = math.prod(x.shape[:-1])
        x = x.contiguous()
        if self._peers is not None and max(sizes) * x.itemsize <= self._staged and x.itemsize > 1:
            return self._peers.all_gather(x.view(rows, x.shape[-1]), sizes).view(*x.shape[:-1], sum(sizes))
        if self._nccl is None:
            raise CollectiveError(f"rows of {max(sizes)} columns are too long to be gathered")
        widest = max(sizes)
        padded = torch.nn.functional.pad(x.view(rows, x.shape[-1]), (0, widest - x.shape[-1])).contiguous()
        parts = self._nccl.all_gather(padded, padded.new_empty(self.size, rows, widest))
        joined = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)
        return joined.view(*x.shape[:-1], sum(sizes))

    def reduce_rows(self, x: Tensor) -> Tensor:
        """The sum over ranks of this rank's part of x [T, ...], in its place there; the parts are equal, the others are spoilt."""
        own = x.view(self.size, -1, *x.shape[1:])[self.rank]
        if self._nccl is not None:
            return self._nccl.reduce_scatter(x, own)
        self.all_reduce(x)
        return own

    def gather_rows(self, x: Tensor) -> Tensor:
        """Fills x [T, ...], of which each rank has its own part; of any type."""
        parts = x.view(torch.uint8).view(self.size, -1)
        if self._nccl is not None:
            self._nccl.all_gather(parts[self.rank], parts)
            return x
        halves = parts.view(torch.float16)  # (peer memory passes no single bytes)
        most = self._staged // halves.itemsize
        for start in range(0, halves.shape[1], most):
            of_all = halves[:, start : start + most]
            width = of_all.shape[1]
            own = of_all[self.rank :][:1].clone()  # (whose address is a multiple of 16)
            of_all.copy_(self.all_gather(own, [width] * self.size).view(self.size, width))
        return x

    def send_next(self, x: Tensor) -> None:
        """Pass hidden states to the same tp rank of the next stage."""
        if self._behind is not None:
            return self._behind.send(x.contiguous(), 1)
        return self._host.send_next(x.cpu().view(torch.uint8))

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receive hidden states from the previous stage; the shape must be the sent one."""
        return self.recv_into(torch.empty(shape, dtype=dtype, device="cuda"))

    def recv_into(self, x: Tensor) -> Tensor:
        """The same, into x, which is contiguous."""
        if self._before is not None:
            return self._before.recv(x, 0)
        bytes_of = x.view(torch.uint8)
        bytes_of.copy_(self._host.recv_prev(tuple(bytes_of.shape), torch.uint8))
        return x

    def barrier(self) -> None:
        """Returns when the processes of all ranks of the stage are here; says nothing of their devices."""
        if self.size > 1:
            self._host.barrier()

    # ------------------------------------------------------------ trouble

    def guard(self, stuck_s: float) -> AbstractContextManager[None]:
        """Bounds what is done inside, when other ranks have a part in it."""
        return self.watch.guard(stuck_s)

    def check(self) -> None:
        """Raises CollectiveError when results since the last call cannot be trusted. Call it when the device has done a step."""
        reason = self.watch.reason or (self._peers.failure() if self._peers is not None else "")
        if reason:
            self.abort()
            raise CollectiveError(f"rank {self._mesh.worker}: {reason}")

    def abort(self) -> None:
        """Ends all that is under way on this rank's device, and makes the other ranks fail too."""
        if self._peers is not None:
            self._peers.abort()
        self._host.abort()
        for comm in self._comms():
            comm.abort()

    def close(self) -> None:
        """No more is looked after."""
        self.watch.close()

    def _comms(self) -> list[NcclComm]:
        return [comm for comm in (self._nccl, self._before, self._behind) if comm is not None]

    def _failure(self) -> str:
        return next((text for text in (comm.failure() for comm in self._comms()) if text), "")


def _rounded(size: int) -> int:
    return -(-size // 16) * 16

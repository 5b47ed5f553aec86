"""Collectives between the GPUs of one engine on one host: peer memory for small messages, NCCL for large ones and between stages,
torch.distributed where neither is available.

Implements models.forward.Group over tensors on the current device; all calls launch on the current stream and can be captured in a
CUDA graph, except those staged through the host: torch.distributed, and stages that share a GPU. The ranks find each other over the
engine's arena (workers.collectives.rendezvous). Results are bit-identical on all ranks. When a rank fails, stops or falls silent,
`check` or the call that waits for it raises CollectiveError within 15 s.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.machine.starvation import Starvation, children_of
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.allreduce_algos import (
    PUSHED_BYTES,
    STAGED_BYTES,
    TRIED,
    AllReduceAlgo,
    algo_of,
    default_steps,
    describe,
    steps_from,
    usable,
)
from trireme.workers.collectives.nccl import NcclComm
from trireme.workers.collectives.rendezvous import Rendezvous
from trireme.workers.collectives.shm import ShmGroup
from trireme.workers.collectives.timing import time_algo
from trireme.workers.collectives.torch_dist import TorchComm
from trireme.workers.collectives.watchdog import CollectiveWatchdog

MEET_S = 120.0  # ranks of one engine start at about the same time
TOLD = (8 << 10, 8 << 20)  # bytes of the all-reduces timed where they are staged through the host


class AllReduceChoice(NamedTuple):
    """The all-reduce algorithm chosen, and why."""

    how: str
    why: str


class CudaGroup:
    """The ranks of one stage, and its neighbour stages. All ranks make the same calls in the same order, from one thread.

    `host` connects them during start-up. `num_gpus` is the number of GPUs of this host, indexed by Mesh.gpu. `gathered_bytes` is
    a rank's contribution to the largest all_gather; larger ones are split.
    """

    def __init__(
        self, mesh: Mesh, host: ShmGroup, num_gpus: int, *, gathered_bytes: int = 0, timeout_s: float = MEET_S
    ) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp
        self._mesh, self._host = mesh, host
        self._staged = min(max(STAGED_BYTES, _rounded(gathered_bytes)), 8 * STAGED_BYTES)
        self._met: Rendezvous | None = None
        starvation = Starvation()
        self.watch = CollectiveWatchdog(
            self._failure, self.abort, starved=lambda now: starvation.look(now, children_of(os.getppid()))
        )
        self.watch.start()
        with self.watch.guard(timeout_s):
            met = self._met = Rendezvous(
                mesh, host, num_gpus, staged_bytes=self._staged, timeout_s=timeout_s, reason=self._reason
            )
        self._peers, self._nccl, self._before, self._behind = met.peers, met.nccl, met.before, met.behind
        self._large: NcclComm | TorchComm | None = met.nccl or met.torch
        self.ranges = default_steps(
            PUSHED_BYTES, self._staged, has_peers=self._peers is not None, has_nccl=self._nccl is not None
        )

    # ------------------------------------------------------------ start

    @property
    def can_be_captured(self) -> bool:
        """Whether every call can be part of a CUDA graph: not when staged through the host."""
        mesh = self._mesh
        is_linked = (mesh.is_first_stage or self._before is not None) and (
            mesh.is_last_stage or self._behind is not None
        )
        return is_linked and not self._is_staged

    @property
    def _is_staged(self) -> bool:
        """Whether all-reduces are staged through the host."""
        return isinstance(self._large, TorchComm)

    def measure(self) -> AllReduceChoice:
        """Times every algorithm once, and takes the fastest for each size; all ranks call it together. Returns the choice."""
        if self.size == 1:
            return AllReduceChoice("none needed", "one GPU has all of a layer")
        if self._is_staged:
            return AllReduceChoice("torch.distributed (gloo)", f"{self._lacks()}. {self._cost()}")
        if self._nccl is None or self._peers is None:
            return AllReduceChoice(describe(self.ranges), self._lacks())
        with self.watch.guard(MEET_S):
            self.barrier()
            self.ranges = steps_from(self._agreed({size: dict(self._times(size)) for size in TRIED}))
        return AllReduceChoice(describe(self.ranges), "the fastest algorithm for each size, measured at the start")

    def _lacks(self) -> str:
        return self._met.all_lacks() if self._met is not None else ""

    def _cost(self) -> str:
        """Time of all-reduces through the host, in words."""
        times = []
        with self.watch.guard(MEET_S):
            for size in TOLD:
                x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
                self.all_reduce(x)
                begun = time.perf_counter()
                self.all_reduce(x)
                times.append(f"{(time.perf_counter() - begun) * 1e3:.1f} ms for {size >> 10} KiB")
        return f"Every sum waits for the GPU and passes through the host: {', '.join(times)}"

    def _times(self, size: int) -> Iterator[tuple[AllReduceAlgo, float]]:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda")
        for algo in usable(size, pushed=PUSHED_BYTES, staged=self._staged, has_peers=True, has_nccl=True):
            yield algo, time_algo(lambda algo=algo: self._reduce(x, algo))  # type: ignore[misc]

    def _agreed(self, times: dict[int, dict[AllReduceAlgo, float]]) -> dict[int, dict[AllReduceAlgo, float]]:
        """The times of the slowest rank, so that all choose alike."""
        mine = torch.tensor([taken for of_size in times.values() for taken in of_size.values()])
        slowest = self._host.all_gather(mine, [mine.numel()] * self.size).view(self.size, -1).amax(0).tolist()
        agreed = iter(slowest)
        return {size: {algo: next(agreed) for algo in of_size} for size, of_size in times.items()}

    # ------------------------------------------------------------ collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; bit-identical on all ranks."""
        if self.size == 1 or x.numel() == 0:
            return x
        if not x.is_contiguous():
            return x.copy_(self.all_reduce(x.contiguous()))
        if x.nbytes % 16 and self._large is None:
            padded = torch.nn.functional.pad(x.view(-1), (0, -x.numel() % 16))
            return x.copy_(self.all_reduce(padded)[: x.numel()].view(x.shape))
        return self._reduce(x, AllReduceAlgo.NCCL if x.nbytes % 16 else algo_of(self.ranges, x.nbytes))

    def _reduce(self, x: Tensor, algo: AllReduceAlgo) -> Tensor:
        if algo is AllReduceAlgo.NCCL or self._peers is None:
            assert self._large is not None
            return self._large.all_reduce(x)
        return self._peers.all_reduce(x, algo)

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
        if self._large is None:
            raise CollectiveError(f"rows of {max(sizes)} columns are too long to be gathered")
        widest = max(sizes)
        padded = torch.nn.functional.pad(x.view(rows, x.shape[-1]), (0, widest - x.shape[-1])).contiguous()
        parts = self._large.all_gather(padded, padded.new_empty(self.size, rows, widest))
        joined = torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)
        return joined.view(*x.shape[:-1], sum(sizes))

    def reduce_rows(self, x: Tensor) -> Tensor:
        """Reduce-scatter in place: this rank's part of x [T, ...] becomes the sum; the other parts are garbage. Equal parts."""
        own = x.view(self.size, -1, *x.shape[1:])[self.rank]
        if self._nccl is not None:
            return self._nccl.reduce_scatter(x, own)
        self.all_reduce(x)
        return own

    def gather_rows(self, x: Tensor) -> Tensor:
        """All-gather in place: fills x [T, ...], of which each rank has its own part. Any dtype."""
        parts = x.view(torch.uint8).view(self.size, -1)
        if self._nccl is not None:
            self._nccl.all_gather(parts[self.rank], parts)
            return x
        halves = parts.view(torch.float16)  # (peer memory cannot pass single bytes)
        most = self._staged // halves.itemsize
        for start in range(0, halves.shape[1], most):
            of_all = halves[:, start : start + most]
            width = of_all.shape[1]
            own = of_all[self.rank :][:1].clone()  # (whose address is a multiple of 16)
            of_all.copy_(self.all_gather(own, [width] * self.size).view(self.size, width))
        return x

    def send_next(self, x: Tensor) -> None:
        """Sends hidden states to the same tp rank of the next stage."""
        if self._behind is not None:
            return self._behind.send(x.contiguous(), 1)
        return self._host.send_next(x.cpu().view(torch.uint8))

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receives hidden states from the previous stage; the shape must be the sent one."""
        return self.recv_into(torch.empty(shape, dtype=dtype, device="cuda"))

    def recv_into(self, x: Tensor) -> Tensor:
        """The same, into x, which is contiguous."""
        if self._before is not None:
            return self._before.recv(x, 0)
        bytes_of = x.view(torch.uint8)
        bytes_of.copy_(self._host.recv_prev(tuple(bytes_of.shape), torch.uint8))
        return x

    def barrier(self) -> None:
        """Returns when the processes of all ranks of the stage have arrived; does not wait for their devices."""
        if self.size > 1:
            self._host.barrier()

    # ------------------------------------------------------------ failures

    def guard(self, stuck_s: float) -> AbstractContextManager[None]:
        """Bounds the time of work inside in which other ranks take part."""
        return self.watch.guard(stuck_s)

    def check(self) -> None:
        """Raises CollectiveError when results since the last call are invalid. Call it when the device has finished a step."""
        reason = self.watch.reason or (self._peers.failure() if self._peers is not None else "")
        if reason:
            self.abort()
            raise CollectiveError(f"rank {self._mesh.worker}: {reason}")

    def abort(self) -> None:
        """Ends all work in flight on this rank's device, and makes the other ranks fail too."""
        met = self._met
        if met is not None and met.peers is not None:
            met.peers.abort()
        self._host.abort()
        for comm in self._comms():
            comm.abort()

    def close(self) -> None:
        """Stops the watchdog."""
        self.watch.close()

    def _comms(self) -> list[NcclComm | TorchComm]:
        met = self._met  # (the watchdog may ask before there is one)
        found = (met.nccl, met.torch, met.before, met.behind) if met is not None else ()
        return [comm for comm in found if comm is not None]

    def _failure(self) -> str:
        return next((text for text in (comm.failure() for comm in self._comms()) if text), "")

    def _reason(self) -> str:
        """Why the watchdog aborted the collectives."""
        return f"rank {self._mesh.worker}: {self.watch.reason}" if self.watch.reason else ""


def _rounded(size: int) -> int:
    return -(-size // 16) * 16

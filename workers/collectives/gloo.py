"""Fallback collectives over torch.distributed's gloo backend, for ranks that share no memory (or no native extension).

Implements models.forward.Group like workers/collectives/shm.py, with the same results bit for bit: sums are gathered and added
in rank order. One per process, since torch.distributed keeps one process group.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.topology.mesh import Mesh

T = TypeVar("T")


class GlooGroup:
    """The ranks of one stage, and its neighbour stages. `init` is a rendezvous: tcp://HOST:PORT or file:///PATH."""

    def __init__(self, init: str, mesh: Mesh, *, timeout_s: float = 15.0, step_timeout_s: float = 60.0) -> None:
        self.rank = mesh.tp_rank
        self.size = mesh.tp
        self._mesh = mesh
        self._timeout = timedelta(seconds=step_timeout_s)
        limit = timedelta(seconds=timeout_s)
        _run(
            lambda: dist.init_process_group(
                "gloo", init_method=init, rank=mesh.worker, world_size=mesh.num_workers, timeout=limit
            )
        )
        self._stage = _run(lambda: _stage_groups(mesh, limit)[mesh.pp_rank])

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        _run(lambda: dist.all_gather(parts, x, group=self._stage))
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place, in rank order."""
        if self.size == 1:
            return x
        parts = self._gather(x.float().contiguous())
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return x.copy_(total)

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate along the last dim; rank i contributes sizes[i] columns."""
        if self.size == 1:
            return x
        if x.shape[-1] != sizes[self.rank]:
            raise CollectiveError(f"{sizes[self.rank]} columns were expected, got shape {tuple(x.shape)}")
        padded = torch.nn.functional.pad(x, (0, max(sizes) - x.shape[-1])).contiguous()
        parts = self._gather(padded)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def reduce_scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Sum over ranks; rank i keeps its sizes[i] columns of the last dim."""
        if self.size == 1:
            return x
        start = sum(sizes[: self.rank])
        return self.all_reduce(x.clone())[..., start : start + sizes[self.rank]].contiguous()

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copies rank `root`'s x to every rank, in place."""
        if self.size > 1:
            _run(lambda: dist.broadcast(x, src=self._mesh.tp_group()[root], group=self._stage))
        return x

    def barrier(self) -> None:
        """Returns when all ranks of the stage have arrived."""
        _run(lambda: dist.barrier(group=self._stage))

    def send_next(self, x: Tensor) -> None:
        """Sends hidden states to the same tp rank of the next stage."""
        work = _run(lambda: dist.isend(x.contiguous(), self._mesh.worker + self._mesh.tp))
        assert work is not None
        _run(lambda: work.wait(self._timeout))

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receives hidden states from the previous stage."""
        out = torch.empty(shape, dtype=dtype)
        work = _run(lambda: dist.irecv(out, self._mesh.worker - self._mesh.tp))
        assert work is not None
        _run(lambda: work.wait(self._timeout))
        return out

    def abort(self) -> None:
        """Leaves the process group; the peers' next collective fails."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _stage_groups(mesh: Mesh, limit: timedelta) -> list[Any]:
    """Every process creates every stage's group, in the same order, as torch.distributed requires."""
    return [dist.new_group(mesh.at_worker(stage * mesh.tp).tp_group(), timeout=limit) for stage in range(mesh.pp)]


def _run(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveError(f"gloo: {error}") from None

"""Collectives between the CPU ranks of one engine over its shared-memory arena: tensors in,
csrc/cpu/collectives/collectives.cpp below.

Implements models.forward.Group. Never waits forever: time-outs, dead peers and the arena's abort word raise CollectiveError,
after which the engine must be restarted (with a new arena).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.models.native import load_native
from trireme.topology.mesh import Mesh

T = TypeVar("T")


class ShmGroup:
    """The ranks of one stage, and its neighbour stages. All ranks make the same calls in the same order, from one thread.

    `timeout_s` bounds the wait for ranks of the same stage, `step_timeout_s` that for a neighbour stage's step.
    """

    def __init__(self, arena: str, mesh: Mesh, *, timeout_s: float = 15.0, step_timeout_s: float = 60.0) -> None:
        self.rank = mesh.tp_rank
        self.size = mesh.tp
        self._mesh = mesh
        native = load_native()
        self._comm = _run(lambda: native.Comm(arena, mesh.tp_rank, mesh.pp_rank, timeout_s, step_timeout_s))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place, in rank order (float32; other dtypes are accumulated in float32 and rounded once)."""
        if self.size == 1:
            return x
        if x.dtype is not torch.float32 or not x.is_contiguous():
            return x.copy_(self.all_reduce(x.float().contiguous()))
        try:
            self._comm.all_reduce(x)
        except RuntimeError as error:
            raise CollectiveError(str(error)) from None
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Concatenate along the last dim; rank i contributes sizes[i] columns."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], sum(sizes), dtype=x.dtype)
        _run(lambda: self._comm.all_gather(x, out, sizes))
        return out

    def reduce_scatter(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Sum over ranks; rank i keeps its sizes[i] columns of the last dim; float32."""
        if self.size == 1:
            return x
        wide = x.float().contiguous()
        out = torch.empty(*x.shape[:-1], sizes[self.rank])
        _run(lambda: self._comm.reduce_scatter(wide, out, sizes))
        return out.to(x.dtype)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copies rank `root`'s x to every rank, in place. x is contiguous."""
        _run(lambda: self._comm.broadcast(x, root))
        return x

    def barrier(self) -> None:
        """Returns when all ranks of the stage have arrived."""
        _run(self._comm.barrier)

    def send_next(self, x: Tensor) -> None:
        """Sends hidden states to the same tp rank of the next stage. Returns once they are in the ring, usually at once."""
        x = x.contiguous()
        _run(lambda: self._comm.send_next(x))

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Receives hidden states from the previous stage; the shape must be the sent one."""
        out = torch.empty(shape, dtype=dtype)
        _run(lambda: self._comm.recv_prev(out))
        return out

    def abort(self) -> None:
        """Fails every collective of this engine, now and later. Call it when this rank cannot continue."""
        self._comm.abort()


def _run(call: Callable[[], T]) -> T:
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(str(error)) from None

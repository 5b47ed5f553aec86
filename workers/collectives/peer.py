"""All-reduce and all-gather over memory that GPUs of one host map into each other: models._cuda.Peers for tensors.

Used by workers.collectives.cuda, which exchanges the handles. Calls launch on the current stream and can be captured in a graph;
messages longer than the buffer are split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.models.cuda import ops as cuda_ops
from trireme.workers.collectives.allreduce_algos import AllReduceAlgo

DEADLINE_S = 14.0  # of one kernel; the watchdog aborts a little earlier
_TEXTS = {1: "the collectives were aborted", 2: "another rank did not take part in a sum"}


class PeerMemory:
    """This rank's region, and those of the others once `open` has all handles. Raises CollectiveError."""

    HANDLE_BYTES = 64

    def __init__(
        self, rank: int, size: int, *, pushed_bytes: int, staged_bytes: int, deadline_s: float = DEADLINE_S
    ) -> None:
        self.size = size
        self._most = {
            AllReduceAlgo.PUSHED: pushed_bytes,
            AllReduceAlgo.ONE_SHOT: staged_bytes,
            AllReduceAlgo.TWO_SHOT: staged_bytes,
        }
        try:
            self._native: Any = cuda_ops.load().Peers(rank, size, pushed_bytes, staged_bytes, deadline_s)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(f"no memory for collectives: {error}") from None

    def handle(self) -> bytes:
        """This region's handle, for the other ranks."""
        try:
            return bytes(self._native.handle())
        except RuntimeError as error:
            raise CollectiveError(str(error)) from None

    def open(self, handles: list[bytes]) -> None:
        """Maps the regions of all ranks."""
        try:
            self._native.open(handles)
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(str(error)) from None

    def all_reduce(self, x: Tensor, algo: AllReduceAlgo) -> Tensor:
        """Sum over ranks in rank order, in place, added in float32. x is contiguous and 16 divides its bytes."""
        most, stream = self._most[algo] // x.itemsize, torch.cuda.current_stream().cuda_stream
        if x.numel() <= most:
            self._native.all_reduce(x, x, int(algo), stream)
            return x
        for part in x.view(-1).split(most):
            self._native.all_reduce(part, part, int(algo), stream)
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Concatenates the ranks' x [T, sizes[rank]] along the last dim."""
        rows, stream = x.shape[0], torch.cuda.current_stream().cuda_stream
        out = torch.empty(rows, sum(sizes), dtype=x.dtype, device=x.device)
        widths = [size * x.itemsize for size in sizes]
        part = max(1, self._most[AllReduceAlgo.ONE_SHOT] // max(1, max(widths)))
        for start in range(0, rows, part):
            end = min(start + part, rows)
            self._native.all_gather(x[start:end], out[start:end], widths, stream)
        return out

    def abort(self) -> None:
        """Ends every kernel in flight or launched later. Callable from any thread."""
        self._native.abort()

    def failure(self) -> str:
        """Why results are invalid; "" while they are valid."""
        status = int(self._native.status())
        return _TEXTS.get(status, f"status {status}") if status else ""

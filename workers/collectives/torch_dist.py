"""All-reduce over GPUs by torch.distributed: a gloo process group over loopback, tensors staged in host memory.

Used by workers.collectives.cuda where neither peer memory nor NCCL is available. Every call waits for the device and for the other
ranks, so none can be part of a graph. A dead rank is noticed at once, a hanging one by the watchdog or after `deadline_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from trireme.errors import CollectiveError

dist: Any = torch.distributed  # (much of it has no types)
DEADLINE_S = 14.0  # of one piece; the watchdog aborts a little earlier
PIECE_BYTES = 8 << 20
_LOOK_S = 0.1  # between checks whether the wait was aborted


def lacks_torch() -> str:
    """What this torch lacks for it; "" if nothing."""
    if not dist.is_available():
        return "torch was built without torch.distributed"
    return "" if dist.is_gloo_available() else "torch was built without gloo"


class TorchComm:
    """One process group. All its ranks make the same calls in the same order, from one thread.

    `rendezvous` is a path that all of them open. Raises CollectiveError if they do not connect within `timeout_s`; `reason` says
    why the group was aborted.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        deadline_s: float = DEADLINE_S,
        reason: Callable[[], str] = lambda: "",
    ) -> None:
        self.rank, self.size = rank, size
        self._deadline_s, self._reason = deadline_s, reason
        self._is_aborted = False
        is_pinned = torch.cuda.is_available()
        self._own = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self._all = torch.empty(size * PIECE_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        self._options = dist.distributed_c10d.AllgatherOptions()
        self._options.timeout = timedelta(seconds=deadline_s + 1.0)  # of gloo's threads; ours ends first, and says why
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = dist.ProcessGroupGloo(dist.FileStore(rendezvous, size), rank, size, options)
        except RuntimeError as error:
            raise CollectiveError(f"torch.distributed: {_first_line(error)}") from None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place: in rank order, accumulated in float32, rounded once. x is contiguous."""
        for piece in _pieces(x):
            first, *others = self._gathered(piece)
            total = first.float()
            for part in others:
                total += part
            piece.copy_(total)
        return x

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        """out = all ranks' x, concatenated. Both are contiguous."""
        parts, start = out.view(self.size, x.numel()), 0
        for piece in _pieces(x):
            parts[:, start : start + piece.numel()].copy_(self._gathered(piece))
            start += piece.numel()
        return out

    def failure(self) -> str:
        """ "" : failures are raised by the calls."""
        return ""

    def abort(self) -> None:
        """Ends a waiting call; later ones fail. Callable from any thread, any number of times."""
        self._is_aborted = True

    def _gathered(self, x: Tensor) -> Tensor:
        """All ranks' x [n], as [size, n] on x's device."""
        count = x.nbytes
        own = self._own[:count]
        own.copy_(x.view(torch.uint8))
        parts = self._all[: self.size * count].view(self.size, count)
        self._wait(lambda: self._group.allgather([list(parts)], [own], self._options))
        return parts.to(x.device, copy=True).view(x.dtype)

    def _wait(self, start: Callable[[], Any]) -> None:
        until = time.monotonic() + self._deadline_s
        try:
            self._need_alive()
            work = start()
            while not self._is_over(work):
                self._need_alive()
                if time.monotonic() > until:
                    raise CollectiveError(f"torch.distributed: another rank did not come within {self._deadline_s:g} s")
        except CollectiveError:
            self._is_aborted = True
            raise
        except RuntimeError as error:
            self._is_aborted = True
            raise CollectiveError(f"torch.distributed: {_first_line(error)}") from None

    def _is_over(self, work: Any) -> bool:
        """Waits for one interval; whether the work is done. Raises RuntimeError when it failed."""
        slice_ = timedelta(seconds=_LOOK_S)
        try:
            work.wait(slice_)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait(slice_)  # it ended just after the interval: this call tells whether it failed
        return True

    def _need_alive(self) -> None:
        if self._is_aborted:
            raise CollectiveError(self._reason() or "the collectives were aborted")


def _pieces(x: Tensor) -> Sequence[Tensor]:
    """x in pieces that fit into the staging buffer."""
    return x.view(-1).split(PIECE_BYTES // x.itemsize) if x.numel() else ()


def _first_line(error: RuntimeError) -> str:
    """The message without the location in gloo's sources and the possible causes."""
    text = str(error).partition("\n")[0]
    return (text.partition("] ")[2] if text.startswith("[") else text).partition(". This")[0]

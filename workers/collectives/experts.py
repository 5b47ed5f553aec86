"""Experts of a model on several engines, behind models.forward.ExpertGroup: tokens of all engines go to all, sums come back.

Every engine brings a batch of the agreed shape, filled up with zeros; one with nothing to do brings nothing but zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.workers.collectives.lockstep import Peers, run


class SplitExperts:
    """This engine's share. `num_tokens` is the shape that all have agreed on for the step under way."""

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size = peers.rank, peers.size
        self.num_tokens = 0
        self._peers = peers

    def spread(self, x: Tensor) -> Tensor:
        """The rows of all engines, by rank, from this one's [T, H]."""
        padded = torch.zeros(self.num_tokens, *x.shape[1:])
        padded[: x.shape[0]] = x
        return torch.from_numpy(self._peers.gather(padded.numpy())).flatten(0, 1)

    def collect(self, x: Tensor, count: int) -> Tensor:
        """The first `count` of this engine's rows, each summed over all engines, from what each has computed for all rows."""
        x = x.float().contiguous()
        run(lambda: self._peers.comm.all_reduce(x.data_ptr(), x.numel()))
        return self.own(x, count)

    def own(self, x: Tensor, count: int) -> Tensor:
        start = self.rank * self.num_tokens
        return x[start : start + count]

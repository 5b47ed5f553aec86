"""Expert parallelism over several engines, behind models.forward.ExpertGroup: all-gather of tokens, sum of outputs.

Every engine contributes a batch of the agreed shape, padded with zeros; one without work contributes only zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.workers.collectives.lockstep import Peers, run


class SplitExperts:
    """This engine's share. `num_tokens` is the padded batch size agreed for the running step."""

    def __init__(self, peers: Peers) -> None:
        self.rank, self.size = peers.rank, peers.size
        self.num_tokens = 0
        self._peers = peers

    def spread(self, x: Tensor) -> Tensor:
        """All-gathers the tokens of all engines, by rank, from this one's [T, H]."""
        padded = torch.zeros(self.num_tokens, *x.shape[1:])
        padded[: x.shape[0]] = x
        return torch.from_numpy(self._peers.gather(padded.numpy())).flatten(0, 1)

    def collect(self, x: Tensor, count: int) -> Tensor:
        """The first `count` of this engine's tokens, each summed over the outputs that all engines computed for it."""
        x = x.float().contiguous()
        run(lambda: self._peers.comm.all_reduce(x))
        return self.own(x, count)

    def own(self, x: Tensor, count: int) -> Tensor:
        start = self.rank * self.num_tokens
        return x[start : start + count]

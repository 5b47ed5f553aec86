"""Collectives between lockstep engines: the agreement before each step, and batches of the agreed shape.

Used by workers of engines that split the experts of a model. Torch-free. Uses the shared memory of
trireme/topology/arena.py and never waits forever: the death of another engine, an abort and a time-out raise
CollectiveError, after which all engines must restart.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trireme.errors import CollectiveError, EngineError
from trireme.models.native import load_native
from trireme.topology.lockstep import Agreed, Ballot, agree

Item = TypeVar("Item", bound=np.generic)


class Peers:
    """`rank` of `size` engines. All make the same calls in the same order, each from one thread."""

    def __init__(self, arena: str, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.num_steps = 0
        self.trace = 0  # a checksum over everything agreed so far: equal on all engines
        native = load_native()
        self.comm: Any = run(lambda: native.Comm(arena, rank, 0, timeout_s, timeout_s))

    def agree(self, ballot: Ballot | None, num_tokens: int, num_pieces: int = 1) -> Agreed:
        """Combines the ballots of all engines for this step: one all-gather."""
        if ballot is None:
            raise EngineError("a step came without a ballot to an engine that steps together with others")
        own = np.array(ballot._replace(num_tokens=num_tokens, num_pieces=num_pieces), np.int64)
        ballots = [Ballot(*row) for row in self.gather(own).tolist()]
        agreed = agree([b._replace(has_work=bool(b.has_work), is_ready=bool(b.is_ready)) for b in ballots])
        self.num_steps += 1
        self.trace = zlib.crc32(repr((ballot[:2], agreed)).encode(), self.trace)
        return agreed

    def gather(self, x: NDArray[Item]) -> NDArray[Item]:
        """All engines' x, by rank; they have the same shape."""
        x = np.ascontiguousarray(x)
        out = np.empty((self.size, *x.shape), x.dtype)
        sizes = [x.size] * self.size
        run(lambda: self.comm.all_gather(x.reshape(-1), out.reshape(-1), sizes))
        return out

    def abort(self) -> None:
        """Fails every collective of the group, now and later. For an engine that cannot continue."""
        self.comm.abort()


T = TypeVar("T")


def run(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:
        raise CollectiveError(str(error)) from None

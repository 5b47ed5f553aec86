"""State of the running sequences as columns indexed by batch slot, and the decoding sequences as one DecodeBatch.

Owned by the scheduler. A pure decode step is a few array operations over the columns, however many sequences run; a Request reads
its own numbers here while it has a slot. Knows no block, queue or policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trireme.transport.wire.columns import Column, Ids, pack, pack_ids

Mask = NDArray[np.bool_]
Slots = NDArray[np.intp]
Ints = NDArray[np.int32]

NOTHING = -2  # in `SlotColumns.token`: no token for the next plan to compute
HELD = -1  # a token that the workers hold, or will hold once the previous steps have run
MANY_STOPS = 64  # above this a union of stop ids is rebuilt when sequences leave
TAIL_BLOCKS = 8  # a decoding sequence is handled individually once in so many blocks
FEW_STOPS = 8  # up to here comparing with each is faster than searching


class SlotColumns:
    """One entry per slot of the persistent batch; entries of free slots are undefined, except that `known` is 0."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.computed = np.zeros(num_rows, np.int32)  # tokens whose KV exists once every plan has run
        self.capacity = np.zeros(num_rows, np.int32)  # tokens that fit into the blocks
        self.limit = np.zeros(num_rows, np.int32)  # tokens at which the sequence ends
        self.last_step = np.zeros(num_rows, np.int64)  # newest plan that contains the sequence
        self.token = np.full(num_rows, NOTHING, np.int32)  # for the next plan: an id, HELD or NOTHING
        self.decoding = np.zeros(num_rows, np.bool_)  # in the decode batch, or about to join it
        self.known = np.zeros(num_rows, np.int32)  # known tokens
        self.itl_target = np.full(num_rows, np.inf)  # seconds that the sequence may wait for a token
        self.tail = np.zeros((num_rows, TAIL_BLOCKS * block_size), "<i4")  # the newest of them: a ring over positions
        self._flat_tail = self.tail.reshape(-1)

    def clear(self, row: int, limit: int, itl_target: float) -> None:
        """Initializes a slot for a sequence that has computed nothing."""
        self.itl_target[row] = itl_target
        self.computed[row] = self.capacity[row] = self.last_step[row] = 0
        self.limit[row] = limit
        self.token[row] = NOTHING
        self.decoding[row] = False

    def append(self, slots: Slots, place: Ints, tokens: Ints) -> None:
        """Appends newest tokens of `slots` to their rings. Where a ring wraps, KVCache.take_tails must come first."""
        self._flat_tail[slots * self.tail.shape[1] + place] = tokens


class BatchMember(Protocol):
    """A decoding sequence, as far as the parallel arrays mirror it."""

    row: int
    rid: int
    front: str
    stops: frozenset[int]


class FrontendShare(NamedTuple):
    """A frontend's part of a decode batch: request ids, and their indices (None: the whole batch)."""

    front: str
    rids: Ids
    places: Slots | None


class DecodeBatch:
    """Decoding sequences in policy order, as parallel arrays. Immutable: steps in flight keep the one they were made from."""

    __slots__ = ("_rows", "_shares", "fronts", "requests", "rids", "slots", "stops")

    def __init__(
        self,
        slots: Slots,
        requests: NDArray[np.object_],
        rids: NDArray[np.int64],
        fronts: NDArray[np.object_],
        stops: frozenset[int],
    ) -> None:
        self.slots = slots
        self.requests = requests
        self.rids = rids
        self.fronts = fronts
        self.stops = stops  # a superset of the stop ids of its sequences
        self._rows: Column | None = None
        self._shares: list[FrontendShare] = []

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def rows(self) -> Column:
        """The slots, encoded for the wire."""
        if self._rows is None:
            self._rows = pack(self.slots)
        return self._rows

    @property
    def shares(self) -> list[FrontendShare]:
        """The sequences grouped by frontend."""
        if not self._shares and len(self):
            first = self.fronts[0]
            if (self.fronts == first).all():
                self._shares = [FrontendShare(first, pack_ids(self.rids), None)]
            else:
                for front in dict.fromkeys(self.fronts.tolist()):
                    places = np.flatnonzero(self.fronts == front)
                    self._shares.append(FrontendShare(front, pack_ids(self.rids[places]), places))
        return self._shares

    def stopping(self, tokens: Ints) -> list[int]:
        """Indices of `tokens` (one per sequence) that end their sequence."""
        if len(self.stops) > FEW_STOPS:
            return np.flatnonzero(np.isin(tokens, list(self.stops))).tolist()
        places: list[int] = []
        for stop in self.stops:
            hits = tokens == stop
            if np.count_nonzero(hits):
                places += hits.nonzero()[0].tolist()
        return places

    def where(self, mask: Mask) -> DecodeBatch:
        """The sequences selected by `mask`."""
        requests = self.requests[mask]
        stops = self.stops if len(self.stops) <= MANY_STOPS else union_of_stops(requests.tolist())
        return DecodeBatch(self.slots[mask], requests, self.rids[mask], self.fronts[mask], stops)

    def plus(self, requests: Sequence[BatchMember]) -> DecodeBatch:
        """The batch with more sequences appended."""
        added = decode_batch_of(requests)
        return DecodeBatch(
            np.concatenate([self.slots, added.slots]),
            np.concatenate([self.requests, added.requests]),
            np.concatenate([self.rids, added.rids]),
            np.concatenate([self.fronts, added.fronts]),
            self.stops | added.stops,
        )


def decode_batch_of(requests: Sequence[BatchMember]) -> DecodeBatch:
    """A decode batch of sequences that have slots, in the given order."""
    return DecodeBatch(
        np.array([row.row for row in requests], np.intp),
        _objects(requests),
        np.array([row.rid for row in requests], np.int64),
        _objects([row.front for row in requests]),
        union_of_stops(requests),
    )


def union_of_stops(requests: Sequence[BatchMember]) -> frozenset[int]:
    return frozenset().union(*{row.stops for row in requests})


def _objects(values: Sequence[object]) -> NDArray[np.object_]:
    found = np.empty(len(values), np.object_)
    found[:] = values
    return found

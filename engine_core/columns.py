"""Numbers of the running rows as columns indexed by batch slot, and the decoding rows as one cohort.

Owned by the scheduler. A step that only decodes is a few array operations over them, however many rows run; a Request reads
its own numbers here while it has a slot. Knows no block, queue or policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine_core.request import Request

Mask = NDArray[np.bool_]
Slots = NDArray[np.int64]

NOTHING = -2  # in `Columns.token`: no token that the next plan could compute
HELD = -1  # a token that the workers hold themselves, or will when the steps before have run
MANY_STOPS = 64  # a union of stop ids beyond this is made anew when rows leave


class Columns:
    """One entry per slot of the persistent batch; entries of free slots mean nothing."""

    def __init__(self, num_rows: int) -> None:
        self.computed = np.zeros(num_rows, np.int64)  # tokens whose KV is there once every plan has run
        self.capacity = np.zeros(num_rows, np.int64)  # tokens that fit into the blocks
        self.limit = np.zeros(num_rows, np.int64)  # tokens at which the row ends
        self.last_step = np.zeros(num_rows, np.int64)  # newest plan with the row
        self.token = np.full(num_rows, NOTHING, np.int64)  # what the next plan would say: an id, HELD or NOTHING
        self.decoding = np.zeros(num_rows, np.bool_)  # in the cohort, or about to join it

    def clear(self, row: int, limit: int) -> None:
        """A slot for a row that has computed nothing."""
        self.computed[row] = self.capacity[row] = self.last_step[row] = 0
        self.limit[row] = limit
        self.token[row] = NOTHING
        self.decoding[row] = False


@dataclass(frozen=True, slots=True)
class Cohort:
    """Decoding rows in policy order, as parallel lists. Never changed: steps in flight keep the one they were made of."""

    slots: Slots
    requests: list[Request]
    appends: list[Callable[[int], None]]  # of each row's tokens
    rids: list[int]
    fronts: list[str]
    stops: frozenset[int]  # every id that ends one of the rows, and maybe a few more

    def __len__(self) -> int:
        return len(self.requests)

    def where(self, mask: Mask) -> Cohort:
        """The rows that `mask` selects."""
        picks = mask.tolist()
        requests = list(compress(self.requests, picks))
        stops = self.stops if len(self.stops) <= MANY_STOPS else union_of_stops(requests)
        return Cohort(
            self.slots[mask],
            requests,
            list(compress(self.appends, picks)),
            list(compress(self.rids, picks)),
            list(compress(self.fronts, picks)),
            stops,
        )

    def plus(self, requests: list[Request]) -> Cohort:
        """With more rows behind the ones it has."""
        added = cohort_of(requests)
        return Cohort(
            np.concatenate([self.slots, added.slots]),
            self.requests + added.requests,
            self.appends + added.appends,
            self.rids + added.rids,
            self.fronts + added.fronts,
            self.stops | added.stops,
        )


def cohort_of(requests: list[Request]) -> Cohort:
    """A cohort of rows that have slots, in the given order."""
    return Cohort(
        np.array([row.row for row in requests], np.int64),
        list(requests),
        [row.tokens.append for row in requests],
        [row.rid for row in requests],
        [row.front for row in requests],
        union_of_stops(requests),
    )


def union_of_stops(requests: list[Request]) -> frozenset[int]:
    return frozenset().union(*{row.stops for row in requests})

"""Assigns the queries of a step's prompts to attention kernels. Pure numpy; called by workers.cuda.steps and
models.cuda.host_adapter.

Three paths: `whole`, long prompts without cached context, as dense squares of a few lengths; `fresh`, short prompts without
cached context, packed; `pieces`, any run of queries over its sequence's KV cache. A long prompt of another length is a
square plus a piece, so that squares have few shapes: libraries plan each shape once.

Legend: P prompts; token indices count from the first token of the first prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
PER_OCTAVE = 8  # see Rules
MOST_TOGETHER = 16  # squares per launch


class Rules(NamedTuple):
    """Which prompts take which path. By default all are pieces."""

    whole_from: int = 0  # tokens; prompts at least this long are dense squares, 0: none
    whole_to: int = 1 << 30  # the sliding window: longer prompts are pieces
    packs_fresh: bool = False  # shorter prompts are packed
    per_octave: int = PER_OCTAVE  # lengths of squares between a power of two and the next

    def beside_streams(self) -> Rules:
        """For steps in which sequences decode: only squares that were planned at the start. A library may plan another length for
        50 ms, in which all their streams would stand still."""
        return self._replace(per_octave=1)


PIECES = Rules()


class Whole(NamedTuple):
    """`num` consecutive squares of `length` queries from token `first` on."""

    first: int
    num: int
    length: int


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Sizes stay on the host, columns go to the device."""

    whole: tuple[Whole, ...]
    fresh_first: int  # token where packed prompts begin
    fresh_start: Ints  # [F + 1], tokens of packed prompts before each, from 0
    piece_row: Ints  # [P'], index of a piece's prompt
    piece_first: Ints  # [P'], token
    piece_bounds: Ints  # [P' + 1], queries of the pieces before, from 0
    piece_context: Ints  # [P'], tokens of its sequence up to its last query
    longest_fresh: int

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """The columns that kernels read."""
        return self.piece_row, self.piece_first, self.piece_bounds, self.piece_context, self.fresh_start

    @property
    def num_queries(self) -> int:
        """Queries of all pieces."""
        return int(self.piece_bounds[-1])


def usual_squares(rules: Rules, most_tokens: int) -> list[Whole]:
    """Likely squares in steps of up to `most_tokens` tokens: power-of-two lengths."""
    found = []
    length = 1 << max(rules.whole_from - 1, 0).bit_length()
    while rules.whole_from and length <= min(rules.whole_to, most_tokens):
        most = min(MOST_TOGETHER, most_tokens // length)
        found += [Whole(0, 1 << power, length) for power in range(most.bit_length())]
        length *= 2
    return found


def square_of(length: int, per_octave: int = PER_OCTAVE) -> int:
    """The largest square length that fits in `length`, of `per_octave` between a power of two and the next."""
    unit = max(1, (1 << length.bit_length() - 1) // per_octave)
    return length // unit * unit


def order_prompts(counts: Ints, computed: Ints) -> NDArray[np.int64]:
    """Order of prompts in a step: those with cached context, then new ones, longest first. Independent of the rules, since
    ranks of a model may have chosen different kernels."""
    is_new = computed == 0
    return np.lexsort((np.where(is_new, -counts, 0), is_new))


def plan_prompts(counts: Ints, computed: Ints, rules: Rules) -> PromptPlan:
    """Plans prompts of `counts` new tokens after `computed` cached ones each, in the order of order_prompts."""
    ends = np.cumsum(counts)
    starts = ends - counts
    is_whole = _are_whole(counts, computed, rules)
    is_fresh = (computed == 0) & (counts < (rules.whole_from or counts + 1)) & rules.packs_fresh
    squares = np.zeros_like(counts)
    squares[is_whole] = [square_of(count, rules.per_octave) for count in counts[is_whole].tolist()]
    left = np.where(is_fresh, 0, counts - squares)
    rows = np.flatnonzero(left)
    fresh = np.flatnonzero(is_fresh)
    sizes = counts[fresh]
    return PromptPlan(
        whole=tuple(_groups(starts[is_whole].tolist(), squares[is_whole].tolist())),
        fresh_first=int(starts[fresh[0]]) if fresh.size else 0,
        fresh_start=_from_zero(sizes),
        piece_row=rows.astype(np.int32),
        piece_first=(starts + squares)[rows].astype(np.int32),
        piece_bounds=_from_zero(left[rows]),
        piece_context=(computed + counts)[rows].astype(np.int32),
        longest_fresh=int(sizes.max(initial=0)),
    )


def _are_whole(counts: Ints, computed: Ints, rules: Rules) -> NDArray[Any]:
    if not rules.whole_from:
        return np.zeros(counts.shape, np.bool_)
    found: NDArray[Any] = (computed == 0) & (counts >= rules.whole_from) & (counts <= rules.whole_to)
    return found


def _groups(starts: list[int], lengths: list[int]) -> list[Whole]:
    """Groups adjacent squares of one length by powers of two, since their count is part of the shape."""
    found: list[Whole] = []
    at = 0
    while at < len(starts):
        run = 1
        while at + run < len(starts) and lengths[at + run] == lengths[at] == starts[at + run] - starts[at + run - 1]:
            run += 1
        count = min(MOST_TOGETHER, 1 << run.bit_length() - 1)
        found.append(Whole(starts[at], count, lengths[at]))
        at += count
    return found


def _from_zero(sizes: NDArray[Any]) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)

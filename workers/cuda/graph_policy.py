"""Which step sizes are worth a CUDA graph, from the shapes of the steps seen. Pure: no torch, no clock, no randomness, so that
ranks which see the same plans decide alike.

Queried by workers.cuda.runner for every step, and by workers.cuda.graph_adapt when a change is due. A shape is one or two counts
((sequences,), or (decoding sequences, prompt tokens)); a size covers the shapes that exceed it in no count, and costs the tokens
that it computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

Size = tuple[int, ...]

WINDOW = 1024  # steps after which counts are halved
LEAST_STEPS = 64  # recent steps that must have gained from a new size
LEAST_SHARE = 50  # a new size saves at least one in so many of the computed tokens
MARGIN = 2  # a new size must save this many times what the size dropped for it still saves
MOST_KNOWN = 4096  # cached lookups of shapes


class Change(NamedTuple):
    """`gain`: the padding that the recent steps would have avoided."""

    add: Size | None
    drop: Size | None
    gain: int


class GraphPolicy:
    """The captured sizes, initially those of `first`, and the shapes seen. Sizes of `grid` may be added, until `most` are captured.

    The largest sizes of `first` and its smallest are never dropped: a shape covered at first stays covered.
    """

    def __init__(self, first: Iterable[Size], grid: Iterable[Size] = (), *, most: int = 0) -> None:
        self._last_used = dict.fromkeys(sorted(set(first), key=_order), 0)
        self.most = max(most, len(self._last_used))
        self._kept = _cover(self._last_used)
        covered = (size for size in grid if any(_holds(kept, size) for kept in self._kept))
        self._grid = sorted({*covered, *self._last_used}, key=_order)
        self._counts: dict[Size, int] = {}  # steps, by the smallest size of the grid that covers them
        self._places: dict[Size, tuple[Size | None, Size | None]] = {}  # shape -> that size, and the captured one
        self._num_seen = 0
        self._vain_bytes: int | None = None  # bytes held when a drop was last requested to free memory

    @property
    def captured(self) -> list[Size]:
        """The captured sizes, cheapest first."""
        return sorted(self._last_used, key=_order)

    @property
    def grid(self) -> list[Size]:
        """All sizes that may ever be captured: those covered by one of `first`."""
        return self._grid

    @property
    def kept(self) -> frozenset[Size]:
        """The sizes that are never dropped."""
        return self._kept

    def fit(self, shape: Size) -> Size | None:
        """The cheapest captured size that covers `shape`."""
        return self._place(shape)[1]

    def note(self, shape: Size) -> None:
        """Counts a step of this shape."""
        needed, used = self._place(shape)
        self._num_seen += 1
        if used is not None:
            self._last_used[used] = self._num_seen
        if needed is not None:
            self._counts[needed] = self._counts.get(needed, 0) + 1
        if self._num_seen % WINDOW == 0:
            self._counts = {size: count // 2 for size, count in self._counts.items() if count > 1}

    def change(self, held: int = 0, growth: int = 0, most_bytes: int = 1, *, least_gain: int = 0) -> Change | None:
        """The change worth making now, if any (a question). All captured sizes hold `held` bytes, a further one may take
        `growth`, and `most_bytes` is the limit. A new size must save more than `least_gain` tokens of padding."""
        oldest = self._least_recent()
        if held > most_bytes:  # one after the other, as long as that frees memory
            is_vain = self._vain_bytes is not None and held >= self._vain_bytes
            return Change(None, oldest, 0) if oldest is not None and not is_vain else None
        if held + growth > most_bytes:
            return None
        gain, size = self._best()
        if not size or gain <= least_gain:
            return None
        if len(self._last_used) < self.most:
            return Change(size, None, gain)
        if oldest is None or gain <= MARGIN * self._loss(oldest, size):
            return None
        return Change(size, oldest, gain)

    def add(self, size: Size) -> None:
        """The size has been captured."""
        self._last_used[size] = self._num_seen
        self._places.clear()

    def drop(self, size: Size, *, held: int | None = None) -> None:
        """The size has been dropped. `held`: the bytes all sizes held when the drop was requested to free memory."""
        assert size not in self._kept
        del self._last_used[size]
        self._places.clear()
        if held is not None:
            self._vain_bytes = held

    def _place(self, shape: Size) -> tuple[Size | None, Size | None]:
        place = self._places.get(shape)
        if place is None:
            if len(self._places) >= MOST_KNOWN:
                self._places.clear()
            needed = next((size for size in self._grid if _holds(size, shape)), None)
            used = next((size for size in self.captured if _holds(size, shape)), None)
            place = self._places[shape] = needed, used
        return place

    def _best(self) -> tuple[int, Size]:
        """The size that would have saved most padding, and how much; 0 if none saves enough."""
        seen = [(needed, count, sum(used)) for needed, count in self._counts.items() if (used := self.fit(needed))]
        least = sum(count * cost for _, count, cost in seen) / LEAST_SHARE
        best: tuple[int, Size] = (0, ())
        for size in self._counts.keys() - self._last_used.keys():
            mine, steps, gain = sum(size), 0, 0
            for needed, count, cost in seen:
                if cost > mine and _holds(size, needed):
                    steps += count
                    gain += count * (cost - mine)
            if steps >= LEAST_STEPS and gain >= least:
                best = max(best, (gain, size))
        return best

    def _loss(self, size: Size, added: Size) -> int:
        """The extra padding without a captured size, once `added` is captured."""
        others = sorted({*self._last_used, added} - {size}, key=_order)
        loss = 0
        for needed, count in self._counts.items():
            if self.fit(needed) == size:
                loss += count * max(0, sum(next(other for other in others if _holds(other, needed))) - sum(size))
        return loss

    def _least_recent(self) -> Size | None:
        """The least recently used size that may be dropped; among equals the largest."""
        free = [size for size in self._last_used if size not in self._kept]
        return min(free, key=lambda size: (self._last_used[size], [-count for count in size]), default=None)


def _holds(size: Size, shape: Size) -> bool:
    return size[0] >= shape[0] and size[-1] >= shape[-1]  # of one or two counts


def _order(size: Size) -> tuple[int, Size]:
    return sum(size), size


def _cover(sizes: Iterable[Size]) -> frozenset[Size]:
    """The sizes that no other one covers, and the smallest."""
    found = {size for size in sizes if not any(size != other and _holds(other, size) for other in sizes)}
    return frozenset(found | {min(sizes, key=_order)} if found else ())

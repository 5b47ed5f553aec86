"""After the death of an engine: which of its rows go on, in which order, and which one is to blame. Pure.

Used by serving/engines/client.py. A row that kills engines must not kill them all, and its batch-mates must not be ended for
it. So a row that was running on an engine that died is a suspect until it has gained a token elsewhere; suspects are tried in
groups, one group after the other: first together those that had been gaining tokens, which are hardly to blame, then each of the
others alone. Who was the only suspect on an engine that died is guilty: it ran on two engines when they died. Several suspects
that die together are each tried alone. A death that a guilty row explains does not count against the rows that were beside it.
Who lost only the connection to an engine that lives has moved, but is no suspect for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from trireme.serving.engines.replay import Replay


class Lost(Protocol):
    """A row of an engine that died."""

    replay: Replay

    @property
    def was_placed(self) -> bool:
        """It had a place in the batch there: it was running."""

    @property
    def has_gained(self) -> bool:
        """It got a token there."""


Row = TypeVar("Row", bound=Lost)


class Verdict(NamedTuple, Generic[Row]):
    """What becomes of the rows: each is in exactly one place."""

    poison: list[Row]  # end, quarantined
    spent: list[Row]  # end: they have moved as often as they may
    free: list[Row]  # go on at once: they never ran there
    trials: list[list[Row]]  # go on group by group


def judge(rows: Sequence[Row], limit: int, *, is_death: bool = True) -> Verdict[Row]:
    """Decides about all rows that one front end had on an engine, and notes it in their replays. `limit`: most moves of a row."""
    suspects = [row for row in rows if is_death and row.was_placed and row.replay.is_suspect]
    poison = suspects if len(suspects) == 1 else []
    spent: list[Row] = []
    free: list[Row] = []
    together: list[Row] = []
    alone: list[list[Row]] = []
    for row in rows:
        replay = row.replay
        if poison and row is poison[0]:
            continue
        if not poison:
            replay.num_moves += 1
        if replay.num_moves > limit:
            spent.append(row)
        elif not (replay.is_suspect or (is_death and row.was_placed)):
            free.append(row)
        elif row.has_gained:
            together.append(row)
        else:
            alone.append([row])
        replay.is_suspect = replay.is_suspect or (is_death and row.was_placed)
    return Verdict(poison, spent, free, [together, *alone] if together else alone)

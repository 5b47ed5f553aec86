"""What ranks that share a collective agree on in every step: each gathers one small row of numbers of every other. Pure.

Used by workers (which gather), engine_core/lifecycle/wave.py (which votes and obeys) and the explorer of tests/sim. One gather
per step says whether the ranks are in the same step at all, which shape the step has, in which graph mode it runs, and how
long to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from trireme.errors import CollectiveError, EngineError

Mode: TypeAlias = Literal["", "abort", "wait", "keep"]
"""What a pause does with rows that have begun: end them, let them end, keep them as they are. "": nobody pauses."""

PAUSES: tuple[Mode, ...] = ("abort", "wait", "keep")


_PAUSED = "it is paused ("


def pause_mode(asked: object) -> Mode:
    """Raises EngineError for a pause that does not exist."""
    for mode in PAUSES:
        if mode == asked:
            return mode
    raise EngineError(f"there is no pause {asked!r:.20}; there are {', '.join(PAUSES)}")


def paused(mode: Mode) -> str:
    """Why an engine makes no progress; "" without a pause."""
    return f"{_PAUSED}{mode})" if mode else ""


def is_pause(stalled: str) -> bool:
    return stalled.startswith(_PAUSED)


class Ballot(NamedTuple):
    """What one rank says of one step."""

    wave: int
    step: int  # of that wave, from 1
    has_work: bool  # it has rows that may go on
    is_ready: bool  # to pause after this step
    num_tokens: int = 0
    graph: int = 0  # mode in which it could run; larger ones ask for more
    num_pieces: int = 0  # forwards in which it would run its rows


class Agreed(NamedTuple):
    """What all ranks know after the gather, alike."""

    has_work: bool  # anyone
    is_ready: bool  # everyone
    num_tokens: int = 0  # the most of any: the shape of everyone's batch
    graph: int = 0  # the least
    num_pieces: int = 0  # the most of any: so many forwards are run by everyone


def agree(ballots: Sequence[Ballot]) -> Agreed:
    """Raises CollectiveError when the ranks are not in the same step: going on would mix up their tensors."""
    if any(ballot[:2] != ballots[0][:2] for ballot in ballots):
        places = ", ".join(f"rank {rank} wave {b.wave} step {b.step}" for rank, b in enumerate(ballots))
        raise CollectiveError(f"ranks are out of step: {places}")
    return Agreed(
        any(ballot.has_work for ballot in ballots),
        all(ballot.is_ready for ballot in ballots),
        max(ballot.num_tokens for ballot in ballots),
        min(ballot.graph for ballot in ballots),
        max(ballot.num_pieces for ballot in ballots),
    )

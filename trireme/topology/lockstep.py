"""Per-step agreement of lockstep ranks: each gathers one small row of numbers from every other. Pure.

Used by workers (which gather), engine_core/lifecycle/wave.py (which votes and obeys) and the explorer of tests/sim. One gather
per step decides whether the ranks are in the same step, the shape of the step, its graph mode, and how long to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from trireme.errors import CollectiveError, EngineError

Mode: TypeAlias = Literal["", "abort", "wait", "keep"]
"""What a pause does with requests that have begun: abort them, wait for them, keep them as they are. "": no pause."""

PAUSES: tuple[Mode, ...] = ("abort", "wait", "keep")


_PAUSED = "it is paused ("


def pause_mode(asked: object) -> Mode:
    """Raises EngineError for an unknown pause mode."""
    for mode in PAUSES:
        if mode == asked:
            return mode
    raise EngineError(f"there is no pause {asked!r:.20}; there are {', '.join(PAUSES)}")


def paused(mode: Mode) -> str:
    """Why a paused engine makes no progress; "" without a pause."""
    return f"{_PAUSED}{mode})" if mode else ""


def is_pause(stalled: str) -> bool:
    return stalled.startswith(_PAUSED)


class Ballot(NamedTuple):
    """One rank's vote on one step."""

    wave: int
    step: int  # of that wave, from 1
    has_work: bool  # it has requests that may go on
    is_ready: bool  # to pause after this step
    num_tokens: int = 0
    graph: int = 0  # graph mode in which it could run; larger values need more
    num_pieces: int = 0  # forwards in which it would run its batch
    target_us: int = 0  # tightest target between tokens of its sequences, microseconds; 0: none
    late_permille: int = 1000  # wait for a first token over its target, in thousandths; 1000: none is late


class Agreed(NamedTuple):
    """The result of the gather, identical on all ranks."""

    has_work: bool  # of any rank
    is_ready: bool  # of all ranks
    num_tokens: int = 0  # the maximum: the shape of every rank's batch
    graph: int = 0  # the minimum
    num_pieces: int = 0  # the maximum: every rank runs so many forwards
    target_us: int = 0  # the minimum of those that have one: all ranks size their prompts by it
    late_permille: int = 1000  # the maximum: all ranks widen that target by it


def agree(ballots: Sequence[Ballot]) -> Agreed:
    """Combines the votes. Raises CollectiveError when the ranks are not in the same step: going on would mix up their tensors."""
    if any(ballot[:2] != ballots[0][:2] for ballot in ballots):
        places = ", ".join(f"rank {rank} wave {b.wave} step {b.step}" for rank, b in enumerate(ballots))
        raise CollectiveError(f"ranks are out of step: {places}")
    return Agreed(
        any(ballot.has_work for ballot in ballots),
        all(ballot.is_ready for ballot in ballots),
        max(ballot.num_tokens for ballot in ballots),
        min(ballot.graph for ballot in ballots),
        max(ballot.num_pieces for ballot in ballots),
        min((ballot.target_us for ballot in ballots if ballot.target_us), default=0),
        max(ballot.late_permille for ballot in ballots),
    )

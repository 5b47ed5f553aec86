"""After the death of an engine: which of its choices go on, in which order, and which one is to blame. Pure.

Used by serving/engines/client.py. A choice that kills engines must not kill them all, and those beside it in the batch must not
be ended for it. So a choice that was running on an engine that died is a suspect until it has gained a token elsewhere;
suspects are tried in groups, one group after the other: first together those that had been gaining tokens, which are hardly to
blame, then each of the others alone. Who was the only suspect on an engine that died is the poison: it ran on two engines when
they died. Several suspects that die together are each tried alone. A death that a poison explains does not count against the
choices that were beside it. Who lost only the connection to an engine that lives has moved, but is no suspect for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from trireme.serving.engines.replay import Replay


class Lost(Protocol):
    """A choice of an engine that died."""

    replay: Replay

    @property
    def was_placed(self) -> bool:
        """It had a place in the batch there: it was running."""

    @property
    def has_gained(self) -> bool:
        """It got a token there."""


Choice = TypeVar("Choice", bound=Lost)


class Verdict(NamedTuple, Generic[Choice]):
    """What becomes of the choices: each is in exactly one place."""

    poison: list[Choice]  # end, quarantined
    exhausted: list[Choice]  # end: they have moved as often as they may
    free: list[Choice]  # go on at once: they never ran there
    probes: list[list[Choice]]  # go on group by group


def judge(choices: Sequence[Choice], limit: int, *, is_death: bool = True) -> Verdict[Choice]:
    """Decides about all choices that one frontend had on an engine, and notes it in their replays. `limit`: most moves of one."""
    suspects = [choice for choice in choices if is_death and choice.was_placed and choice.replay.is_suspect]
    poison = suspects if len(suspects) == 1 else []
    exhausted: list[Choice] = []
    free: list[Choice] = []
    together: list[Choice] = []
    alone: list[list[Choice]] = []
    for choice in choices:
        replay = choice.replay
        if poison and choice is poison[0]:
            continue
        if not poison:
            replay.num_moves += 1
        if replay.num_moves > limit:
            exhausted.append(choice)
        elif not (replay.is_suspect or (is_death and choice.was_placed)):
            free.append(choice)
        elif choice.has_gained:
            together.append(choice)
        else:
            alone.append([choice])
        replay.is_suspect = replay.is_suspect or (is_death and choice.was_placed)
    return Verdict(poison, exhausted, free, [together, *alone] if together else alone)

"""Exhaustive search over a small model of a protocol: every state, every order of events, nothing left to chance.

A model says which events may follow a state. Those of the environment (a request, a crash) need not happen; those of the protocol
will, in some order. `explore` visits all states and shows that the protocol, left alone, comes to rest from each of them: its own
events form no cycle, and where none is left the model finds everything settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

State: TypeAlias = Hashable


class Violation(AssertionError):
    """A rule that the model checks is broken. `trace` are the events that lead there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.trace: list[str] = []

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {number:3d}. {event}" for number, event in enumerate(self.trace, 1))])


class Move(NamedTuple):
    """One event and the state after it."""

    event: str
    state: State
    is_protocol: bool


class Model(Protocol):
    def initial(self) -> State: ...

    def moves(self, state: State) -> Iterator[Move]:
        """Raises Violation for an event that breaks a rule."""
        ...

    def unsettled(self, state: State) -> str:
        """What is still owed where no event of the protocol is left; "" when nothing is."""
        ...


@dataclass
class Explored:
    """What was seen."""

    num_states: int = 0
    num_moves: int = 0
    num_at_rest: int = 0
    is_complete: bool = True  # False: there were more states than allowed
    came_from: dict[int, tuple[int, str]] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "" if self.is_complete else ", and there are more"
        return f"{self.num_states} states, {self.num_moves} moves, {self.num_at_rest} at rest{more}"

    def trace(self, state: int) -> list[str]:
        events: list[str] = []
        while state in self.came_from:
            state, event = self.came_from[state]
            events.append(event)
        return events[::-1]


def explore(model: Model, *, most: int) -> Explored:
    """Visits every state, or the `most` nearest. Raises Violation."""
    seen = Explored()
    numbers: dict[State, int] = {model.initial(): 0}
    queue = deque(numbers)
    after: list[list[int]] = []  # by protocol events
    while queue:
        state = queue.popleft()
        number = len(after)
        follows: list[int] = []
        after.append(follows)
        try:
            for event, found, is_protocol in model.moves(state):
                seen.num_moves += 1
                known = numbers.get(found)
                if known is None:
                    if len(numbers) >= most:
                        seen.is_complete = False
                        continue
                    known = numbers[found] = len(numbers)
                    seen.came_from[known] = (number, event)
                    queue.append(found)
                if is_protocol:
                    follows.append(known)
            if not follows and seen.is_complete:
                seen.num_at_rest += 1
                if owed := model.unsettled(state):
                    raise Violation(owed)
        except Violation as violation:
            violation.trace = [*seen.trace(number), *violation.trace]
            raise
    seen.num_states = len(numbers)
    if seen.is_complete:
        _check_rest(after, seen)
    return seen


def _check_rest(after: list[list[int]], seen: Explored) -> None:
    """No run of the protocol alone goes on for ever: states are taken away from the end; those of a cycle remain."""
    num_open = [len(follows) for follows in after]
    before: list[list[int]] = [[] for _ in after]
    for state, follows in enumerate(after):
        for follow in follows:
            before[follow].append(state)
    at_rest = [state for state, count in enumerate(num_open) if not count]
    num_left = len(after)
    while at_rest:
        num_left -= 1
        for state in before[at_rest.pop()]:
            num_open[state] -= 1
            if not num_open[state]:
                at_rest.append(state)
    if num_left:
        violation = Violation(f"the protocol may go on for ever: {num_left} states never come to rest")
        violation.trace = seen.trace(next(state for state, count in enumerate(num_open) if count))
        raise violation

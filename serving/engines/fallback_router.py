"""Choosing an engine without the coordinator: power of two choices over the last View and this frontend's own counts.

Pure: called by serving/engines/client.py while the coordinator is away. Unknown load counts as zero.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from trireme.transport.wire.messages import View


class FallbackRouter:
    """Estimates choices per engine as (what others had there at the last View) + (what we have there now)."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._others: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._draining: set[int] = set()

    def on_view(self, view: View) -> None:
        """Takes over a new View. Own choices are subtracted from it once, so that a stale View cannot hide or double them."""
        self._draining = {member.engine for member in view.members if member.state == "draining"}
        for member in view.members:
            known = member.in_flight
            if member.load is not None:
                known += member.load.num_waiting + member.load.num_running
            self._others[member.engine] = max(0, known - self._own.get(member.engine, 0))

    def started(self, engine: int, num_choices: int = 1) -> None:
        self._own[engine] = self._own.get(engine, 0) + num_choices

    def ended(self, engine: int, num_choices: int = 1) -> None:
        self._own[engine] = self._own.get(engine, 0) - num_choices

    def forget(self, engine: int) -> None:
        """The engine was replaced: others' choices on it are gone."""
        self._others.pop(engine, None)

    def cost(self, engine: int) -> int:
        return self._others.get(engine, 0) + self._own.get(engine, 0)

    def choose(self, up: Sequence[int]) -> int:
        """One of the engines in `up`, which must not be empty: the cheaper of two distinct ones drawn at random."""
        usable = [engine for engine in up if engine not in self._draining] or list(up)
        if len(usable) == 1:
            return usable[0]
        first, second = self._rng.sample(usable, 2)
        return second if self.cost(second) < self.cost(first) else first

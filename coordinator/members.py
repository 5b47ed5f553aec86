"""The engines and their states, from their own reports: connections, loads, losses.

Pure. Used by core.py. Soft state: a new coordinator starts with every engine "starting" and learns the rest by reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trireme.transport.wire.messages import Load

State = Literal["starting", "ready", "draining", "down"]

# Legal transitions. An engine that reconnects after a lost link is ready again without a restart.
LEGAL: dict[State, frozenset[State]] = {
    "starting": frozenset({"starting", "ready", "draining", "down"}),
    "ready": frozenset({"starting", "draining", "down"}),
    "draining": frozenset({"starting", "ready", "down"}),
    "down": frozenset({"starting"}),
}


@dataclass(slots=True)
class EngineMember:
    """One engine as the coordinator knows it. `load` is None until its current life has reported."""

    index: int
    epoch: int = -1
    state: State = "starting"
    load: Load | None = None
    reason: str = "it has not connected yet"

    def enter(self, state: State) -> None:
        """Changes the state. Raises AssertionError for a transition that LEGAL does not allow."""
        assert state in LEGAL[self.state], f"engine {self.index} cannot go from {self.state} to {state}"
        self.state = state


class Members:
    """All engines of the deployment. Every method returns whether anything changed."""

    def __init__(self, num_engines: int) -> None:
        self._engines = [EngineMember(index) for index in range(num_engines)]

    def __iter__(self) -> Iterator[EngineMember]:
        return iter(self._engines)

    def __len__(self) -> int:
        return len(self._engines)

    def __getitem__(self, index: int) -> EngineMember:
        return self._engines[index]

    def __contains__(self, index: int) -> bool:
        return 0 <= index < len(self._engines)

    def ready(self) -> list[int]:
        return [engine.index for engine in self._engines if engine.state == "ready"]

    def connected(self, index: int, epoch: int) -> bool:
        """An engine said Hello: it is ready with its first report. False for an epoch that was replaced."""
        engine = self._engines[index]
        if epoch < engine.epoch:
            return False
        engine.enter("starting")
        engine.epoch, engine.load, engine.reason = epoch, None, "it has not reported yet"
        return True

    def reported(self, load: Load) -> bool:
        """Stores a report. False when it is late (an older one of this life) or of another life."""
        engine = self._engines[load.engine]
        if load.epoch != engine.epoch or engine.state == "down":
            return False
        if engine.load is not None and load.seq <= engine.load.seq:
            return False
        engine.load = load
        if engine.state == "starting":
            engine.enter("ready")
            engine.reason = ""
        return True

    def lost(self, index: int, epoch: int, reason: str) -> bool:
        """The connection of that life ended. False when a later life has already taken over."""
        engine = self._engines[index]
        if epoch != engine.epoch or engine.state == "down":
            return False
        engine.enter("down")
        engine.load, engine.reason = None, reason
        return True

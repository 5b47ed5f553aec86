"""One engine as a frontend sees it: its link, its life, the choices this frontend has on it, and whether it makes progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from trireme.serving.engines.stream import StreamChoice
from trireme.transport.wire.messages import EngineFacts, Welcome, Wire

SILENT_S = 1.0  # an engine whose loop answers no Ping for so long makes no progress


class Link(Protocol):
    """What the client needs of transport's AsyncConnection and LocalConnection."""

    @property
    def is_up(self) -> bool: ...

    @property
    def server_stalled(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    def send(self, message: Wire) -> bool: ...

    def counts(self) -> dict[str, int]: ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[Callable[[Any], None]], Link]
"""Opens one link inside the running loop; every message of the peer goes to the given callback."""


class EngineState(NamedTuple):
    """One engine as this frontend sees it. `stalled`: why it makes no progress although it is up; "" when it does."""

    engine: int
    is_up: bool
    epoch: int
    facts: EngineFacts | None
    num_rows: int
    stalled: str
    reason: str  # why it is down


class EngineLink:
    """One engine's link and the choices this frontend has on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: Link | None = None
        self.welcome: Welcome | None = None
        self.choices: dict[int, StreamChoice] = {}
        self.lockstep_peers: Sequence[EngineLink] = (
            self,
        )  # those that step together with it: none works without the others
        self.has_missed = False  # something that its engine said
        self.lost_epoch = -1  # the last life that has ended
        self.reason = "it has not started yet"
        self.cause = ""  # its last words

    @property
    def is_up(self) -> bool:
        """It and all of its lockstep peers are there, in the same life."""
        return self.welcome is not None and all(other.is_linked_in(self.welcome.epoch) for other in self.lockstep_peers)

    @property
    def stalled(self) -> str:
        """Why it makes no progress: by its own word, or because its loop does not answer. "" when it does, or is not up."""
        if not self.is_up:
            return ""
        if self.own_stall:
            return self.own_stall
        return next(
            (f"engine {other.index}: {other.own_stall}" for other in self.lockstep_peers if other.own_stall), ""
        )

    @property
    def own_stall(self) -> str:
        """The same without its lockstep peers."""
        if self.link is None:
            return ""
        silent_s = self.link.silent_s
        return f"its loop has not answered for {silent_s:.1f} s" if silent_s > SILENT_S else self.link.server_stalled

    def is_linked_in(self, epoch: int) -> bool:
        return self.welcome is not None and self.welcome.epoch == epoch and self.link is not None and self.link.is_up

    def lost_with(self) -> list[EngineLink]:
        """The engine, and those of its lockstep peers that end with its present life."""
        epoch = self.welcome.epoch if self.welcome is not None else self.lost_epoch
        return [self, *(other for other in self.lockstep_peers if other is not self and other.is_no_later_than(epoch))]

    def is_no_later_than(self, epoch: int) -> bool:
        return self.welcome is not None and self.welcome.epoch <= epoch

    @property
    def state(self) -> EngineState:
        """A snapshot of this engine for readiness and metrics."""
        return EngineState(
            engine=self.index,
            is_up=self.is_up,
            epoch=self.welcome.epoch if self.welcome else -1,
            facts=self.welcome.facts if self.welcome else None,
            num_rows=len(self.choices),
            stalled=self.stalled,
            reason="" if self.is_up else self._why_down(),
        )

    def _why_down(self) -> str:
        absent = next((other for other in self.lockstep_peers if other.welcome is None), self)
        if self.welcome is None or absent is self:
            return self.reason
        return f"it steps together with engine {absent.index}, which is down: {absent.reason}"

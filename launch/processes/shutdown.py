"""How a deployment stops: draining (frontends finish their streams) -> leaving (engines and coordinator go) -> over.

Used by supervisor.py. The time is an argument.
"""

from __future__ import annotations

from typing import Literal

from trireme.config import EngineConfig
from trireme.launch.processes.managed_process import ManagedProcess
from trireme.topology.zones import engines_of_front
from trireme.transport.sockets.poller import NEVER


class Shutdown:
    """Limits in seconds: `cleanup_s` for frontends beyond their drain deadline, `leave_s` for the other parts to exit."""

    def __init__(
        self, config: EngineConfig, parts: tuple[ManagedProcess, ...], *, cleanup_s: float, leave_s: float
    ) -> None:
        self.phase: Literal["running", "draining", "leaving"] = "running"
        self.phase_ends = NEVER
        self._streams_end = NEVER  # the drain deadline
        self._config = config
        self._parts = parts
        self._cleanup_s = cleanup_s
        self._leave_s = leave_s

    def begin(self, now: float, notice_s: float) -> None:
        """Frontends take new requests for `notice_s` more seconds, then finish their streams."""
        drain_s = self._config.serving.drain_timeout
        self.phase = "draining"
        self._streams_end = now + notice_s + drain_s
        self.phase_ends = self._streams_end + self._cleanup_s
        for part in self._parts:
            if part.state == "waiting" and not self.has_time(part, part.restart_at):
                part.state, part.restart_at = "down", NEVER
            if part.role == "front" and part.child is not None:
                part.child.drain(drain_s, notice_s)

    def has_time(self, part: ManagedProcess, restart_at: float) -> bool:
        """Whether an incarnation that begins then would still be useful: in a drain, to requests not yet finished."""
        if self.phase == "running":
            return True
        return part.role != "front" and restart_at + part.start_s < self._streams_end

    def hurry_fronts(self) -> None:
        """Ends the requests of a draining frontend at once when none of its engines will come back."""
        lost = {part.index for part in self._parts if part.role == "engine" and part.state in ("down", "stopped")}
        for part in self._parts:
            if part.role == "front" and part.child is not None and not part.is_hurried:
                part.is_hurried = lost.issuperset(engines_of_front(self._config, part.index))
                if part.is_hurried:
                    part.child.drain(0.0)

    def advance(self, now: float) -> bool:
        """Goes on to the next phase when it is time. True: all parts have gone, or had their time."""
        if self.phase == "draining":
            fronts_live = any(part.child is not None for part in self._parts if part.role == "front")
            if not fronts_live or now >= self.phase_ends:
                self._leave(now)
        return self.phase == "leaving" and (now >= self.phase_ends or all(part.child is None for part in self._parts))

    def _leave(self, now: float) -> None:
        self.phase = "leaving"
        self.phase_ends = now + self._leave_s
        for part in self._parts:
            part.restart_at = NEVER
            if part.child is not None:
                part.child.drain(self._leave_s)

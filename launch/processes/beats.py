"""Detects a stuck part: its loop has sent no beat for too long. Used by supervisor.py, one object per part."""

from __future__ import annotations

from trireme.machine.starvation import Starvation
from trireme.transport.process.boot import Child
from trireme.transport.sockets.poller import NEVER

SILENT_S = 2.0  # without a beat, before starvation is checked
LOOK_S = 1.0  # between two such checks


class Beats:
    """`stuck_s`: the longest time between two beats, excluding CPU starvation. A part that never sent a beat is not judged."""

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._starvation = Starvation()
        self._look_at = 0.0

    def look(self, child: Child, now: float) -> None:
        """Subtracts the time in which the part was starved of CPU from its silence."""
        if child.last_beat and now - child.last_beat >= SILENT_S and now >= self._look_at:
            self._look_at = now + LOOK_S
            child.last_beat += self._starvation.look(now, [child.pid])

    def is_stuck(self, child: Child, now: float) -> bool:
        return bool(child.last_beat) and now - child.last_beat >= self._stuck_s

    def next_due(self, child: Child) -> float:
        """When to call `look` again."""
        if not child.last_beat:
            return NEVER
        return min(child.last_beat + self._stuck_s, max(self._look_at, child.last_beat + SILENT_S))

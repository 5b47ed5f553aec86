"""Processes of previous incarnations that were killed but still exist. Used by supervisor.py.

Most go at once. One that the kernel keeps (it waits for a device, or is frozen) holds its memory for as long as that lasts: its
part restarts without waiting for it.
"""

from __future__ import annotations

import logging

from trireme.transport.process.boot import Child, reap, told_process
from trireme.transport.sockets.poller import NEVER

log = logging.getLogger("trireme.launch")

SOON_S, LATER_S = 0.02, 1.0  # between checks


class Leftovers:
    """`undying_s`: how long the next incarnation of a part waits for the previous process to be gone."""

    def __init__(self, undying_s: float) -> None:
        self._undying_s = undying_s
        self._children: list[Child] = []
        self._named: set[int] = set()  # pids
        self._is_closed = False

    def add(self, child: Child) -> None:
        """Adds a closed child, unless it has gone."""
        if not child.is_gone:
            self._children.append(child)

    def look(self, now: float) -> None:
        """Drops those that have gone, and logs those that are late."""
        for child in [child for child in self._children if child.is_gone]:
            self._children.remove(child)
            if child.pid in self._named:
                log.warning("gone at last. name=%s pid=%d seconds=%.1f", child.name, child.pid, now - child.killed_at)
        for child in self._children:
            if self._is_late(child, now) and child.pid not in self._named:
                self._named.add(child.pid)
                log.error(
                    "was killed and does not go, so its next life begins beside it. name=%s %s seconds=%.1f",
                    child.name,
                    told_process(child),
                    now - child.killed_at,
                )

    def holds(self, name: str) -> bool:
        """Whether a previous process of this part still exists, with all its memory."""
        return any(child.name == name for child in self._children)

    def is_going(self, name: str, now: float) -> bool:
        """Whether a previous process of this part may still be gone soon."""
        return any(child.name == name and not self._is_late(child, now) for child in self._children)

    def next_due(self, now: float) -> float:
        """When to call `look` again."""
        if not self._children:
            return NEVER
        return now + (LATER_S if all(self._is_late(child, now) for child in self._children) else SOON_S)

    def close(self, within_s: float) -> None:
        """Waits for all to go, and abandons, with a log line, those that do not in time. A second call does not wait."""
        self._children = [child for child in self._children if not child.is_gone]
        if not self._is_closed:
            self._is_closed = True
            self._children = reap(self._children, within_s)

    def _is_late(self, child: Child, now: float) -> bool:
        return now - child.killed_at >= self._undying_s

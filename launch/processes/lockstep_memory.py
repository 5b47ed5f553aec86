"""The shared memory of lockstep engines: a new arena for each common epoch. Used by supervisor.py."""

from __future__ import annotations

from trireme.config import EngineConfig
from trireme.topology.arena import Arena, create_peers_arena

HIDDEN = 1024  # elements exchanged per token; larger ones are sent in pieces


class LockstepMemory:
    """Does nothing for engines outside lockstep."""

    def __init__(self, config: EngineConfig) -> None:
        self.is_shared = config.in_lockstep
        self._num_engines = config.parallel.dp
        self._num_tokens = config.scheduler.num_tokens
        self._epoch = -1
        self._arena: Arena | None = None

    @property
    def path(self) -> str:
        return self._arena.path if self._arena is not None else ""

    def join(self, epoch: int) -> None:
        """An engine begins this epoch: a new epoch gets a new arena, since a dead engine left the old one in an unknown state."""
        if self.is_shared and epoch != self._epoch:
            self.close()
            self._epoch, self._arena = epoch, create_peers_arena(self._num_engines, self._num_tokens, HIDDEN)

    def abort(self) -> None:
        """Makes every collective that waits there fail."""
        if self._arena is not None:
            self._arena.abort()

    def close(self) -> None:
        """Releases the arena. May be called twice."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

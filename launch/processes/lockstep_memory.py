"""The memory that engines in lock step share: a new one for each of their common lives. Used by supervise.py."""

from __future__ import annotations

from trireme.config import EngineConfig
from trireme.topology.arena import Arena, create_peers_arena

HIDDEN = 1024  # what engines exchange per token; more of it passes in pieces


class LockstepMemory:
    """Nothing for engines that do not step together."""

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
        """An engine begins this life. What a dead one left in the memory is of no use to the next ones."""
        if self.is_shared and epoch != self._epoch:
            self.close()
            self._epoch, self._arena = epoch, create_peers_arena(self._num_engines, self._num_tokens, HIDDEN)

    def abort(self) -> None:
        """Whoever waits in a collective there hears of it."""
        if self._arena is not None:
            self._arena.abort()

    def close(self) -> None:
        """May be called twice."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

"""Processes that wait, with imports done, to become the next incarnation of a part. Used by supervisor.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from trireme.launch.processes.managed_process import ManagedProcess
from trireme.transport.process.prespawn import Prespawned, prespawn

# Their next incarnation is prespawned with imports done, so that it need not import under load.
SPARE_ROLES = ("coordinator",)


class Spares:
    """`given` are processes for the first incarnations, by the names of the parts; they stay the caller's until taken."""

    def __init__(self, given: dict[str, Prespawned] | None) -> None:
        self._given = given if given is not None else {}
        self._own: dict[str, Prespawned] = {}

    def take(self, name: str) -> Prespawned | None:
        """The process that waits to become this part, if there is one that still lives."""
        prespawned = self._given.pop(name, None) or self._own.pop(name, None)
        if prespawned is not None and prespawned.process.poll() is not None:
            prespawned.discard()
            return None
        return prespawned

    def refill(self, parts: Iterable[ManagedProcess]) -> None:
        """Prespawns what the next incarnations of these parts need."""
        for part in parts:
            if part.role in SPARE_ROLES and part.name not in self._own:
                with contextlib.suppress(OSError):
                    self._own[part.name] = prespawn(part.module, f"spare-{part.name}")

    def close(self) -> None:
        """Ends its own; those given and not taken are the caller's to end. May be called twice."""
        while self._own:
            self._own.popitem()[1].discard()

"""The socket of an engine's frontends, as its loop sees it: over ZMQ, or queues within one process."""

from __future__ import annotations

from typing import Any, Protocol

from trireme.transport.sockets.poller import Source
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import Wire


class FrontServer(Source, Protocol):
    """The part of transport's Server and LocalServer that the loop uses. `progress` and `stalled` go into its answers to Pings."""

    progress: int
    stalled: str

    @property
    def peers(self) -> Any: ...

    def receive(self, limit: int = 1024) -> Any: ...

    def send(self, peer: Peer, message: Wire) -> bool: ...

    def broadcast(self, message: Wire, role: Any = None) -> None: ...

    def counts(self) -> dict[str, int]: ...

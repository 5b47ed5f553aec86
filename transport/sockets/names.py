"""The socket types that other packages use: Server, Connection, AsyncConnection, Poller, Waker.

Nobody outside transport/ sees zmq. Sends never block; queues are bounded; a message that is not the next one exactly as sent ends
its connection. Peers and servers come and go in the stream of messages itself: Hello and Welcome announce a connection,
Disconnected its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trireme.transport.sockets.connection import Connection
from trireme.transport.sockets.framing import Disconnected, Identity
from trireme.transport.sockets.poller import Poller, Source, Waker
from trireme.transport.sockets.server import Peer, Server

if TYPE_CHECKING:
    from trireme.transport.sockets.aio import AsyncConnection

__all__ = ["AsyncConnection", "Connection", "Disconnected", "Identity", "Peer", "Poller", "Server", "Source", "Waker"]


def __getattr__(name: str) -> Any:
    """AsyncConnection on first use: the blocking half must not import asyncio."""
    if name != "AsyncConnection":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trireme.transport.sockets.aio import AsyncConnection

    return AsyncConnection

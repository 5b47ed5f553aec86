"""Server and AsyncConnection in one process, without sockets: for LLM() and tests. Messages pass by reference.

The server side lives in one thread, each connection in an asyncio loop of any thread.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trireme.errors import TransportError
from trireme.transport.sockets.framing import QUEUE_LIMIT, Disconnected
from trireme.transport.sockets.poller import NEVER, Waker
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import PROTOCOL_VERSION, EngineFacts, Hello, Role, Welcome, Wire


class LocalServer:
    """Same methods as sockets.Server. Connections are welcomed by the first receive() after they were made."""

    def __init__(self, name: str = "engine-0", *, facts: EngineFacts | None = None) -> None:
        self.name = name
        self.progress = 0
        self.stalled = ""
        self._facts = facts
        self._peers: dict[str, Peer] = {}
        self._connections: dict[Peer, LocalConnection] = {}
        self._inbox: deque[tuple[Peer, Any]] = deque()
        self._waker = Waker()
        self._lock = threading.Lock()
        self._num_connected = 0
        self._counts = {"received": 0, "sent": 0, "malformed": 0, "refused": 0, "gaps": 0, "dropped_peers": 0}
        self.closed = False

    def connect(self, name: str, on_message: Callable[[Any], None]) -> LocalConnection:
        """Call inside a running asyncio loop; `on_message` runs there. Thread-safe."""
        with self._lock:
            self._num_connected += 1
            peer = Peer(name, "front", 0, os.getpid(), self._num_connected.to_bytes(4, "little"))
        connection = LocalConnection(self, peer, on_message)
        hello = Hello(PROTOCOL_VERSION, b"", "front", name, 0, os.getpid())
        with self._lock:
            if self.closed:
                raise TransportError(f"{self.name} is closed")
            self._connections[peer] = connection
            self._inbox.append((peer, hello))
        self._waker.set()
        return connection

    @property
    def peers(self) -> Mapping[str, Peer]:
        return self._peers

    def set_facts(self, facts: EngineFacts) -> None:
        self._facts = facts

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]:
        """Received messages as (peer, message), at most `limit`, never blocking. See Server.receive."""
        for _ in range(limit):
            if not self._inbox:
                return
            peer, message = self._inbox.popleft()
            if isinstance(message, Hello):
                self._greet(peer)
            elif peer.gone:
                continue
            elif isinstance(message, Disconnected):
                self._forget(peer)
            self._counts["received"] += 1
            yield peer, message
        if self._inbox:
            self._waker.set()

    def send(self, peer: Peer, message: Wire) -> bool:
        """Delivers `message`; False when the peer is gone or its queue is full (then it is dropped)."""
        connection = self._connections.get(peer)
        if peer.gone or connection is None:
            return False
        if not connection.deliver(message):
            self.drop(peer, f"{peer.name} left {QUEUE_LIMIT} messages unread")
            return False
        self._counts["sent"] += 1
        return True

    def broadcast(self, message: Wire, role: Role | None = None) -> None:
        for peer in list(self._peers.values()):
            if role is None or peer.role == role:
                self.send(peer, message)

    def drop(self, peer: Peer, reason: str) -> None:
        connection = self._connections.get(peer)
        if connection is not None and not peer.gone:
            connection.deliver(Disconnected(reason), urgent=True)
            self._inbox.append((peer, Disconnected(reason)))
            self._waker.set()

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def poll_targets(self) -> tuple[int]:
        return self._waker.poll_targets()

    def acknowledge(self) -> bool:
        return self._waker.acknowledge()

    def tick(self, now: float) -> float:
        return NEVER

    def close(self, linger_s: float = 1.0, reason: str = "the engine was closed") -> None:
        """Every connection receives Disconnected(reason) after the messages sent before."""
        with self._lock:
            self.closed = True
            connections = list(self._connections.items())
            self._connections.clear()
            self._peers.clear()
        for peer, connection in connections:
            peer.gone = True
            connection.deliver(Disconnected(reason), urgent=True)
        self._waker.close()

    def put(self, peer: Peer, message: Any) -> bool:
        """Called by a connection to send to the server; thread-safe."""
        with self._lock:
            if self.closed or peer.gone or len(self._inbox) >= QUEUE_LIMIT:
                return False
            self._inbox.append((peer, message))
            self._waker.set()
            return True

    def _greet(self, peer: Peer) -> None:
        former = self._peers.get(peer.name)
        if former is not None:
            self.drop(former, f"{peer.name} connected anew")
        self._peers[peer.name] = peer
        welcome = Welcome(PROTOCOL_VERSION, b"", "engine", self.name, 0, os.getpid(), facts=self._facts)
        self.send(peer, welcome)

    def _forget(self, peer: Peer) -> None:
        peer.gone = True
        self._counts["dropped_peers"] += 1
        with self._lock:
            self._connections.pop(peer, None)
            if self._peers.get(peer.name) is peer:
                del self._peers[peer.name]


class LocalConnection:
    """Same methods as sockets.AsyncConnection. Made by LocalServer.connect."""

    def __init__(self, server: LocalServer, peer: Peer, on_message: Callable[[Any], None]) -> None:
        self.welcome: Welcome | None = None
        self._server = server
        self._peer = peer
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._outbox: deque[Any] = deque()
        self._scheduled = False
        self._lock = threading.Lock()
        self._left_reason = ""

    @property
    def is_up(self) -> bool:
        return self.welcome is not None

    @property
    def server_progress(self) -> int:
        return self._server.progress

    @property
    def server_stalled(self) -> str:
        return self._server.stalled

    @property
    def silent_s(self) -> float:
        """Always 0: no heartbeats are needed inside one process."""
        return 0.0

    def counts(self) -> dict[str, int]:
        return self._server.counts()

    def send(self, message: Wire) -> bool:
        return self.welcome is not None and self._server.put(self._peer, message)

    async def wait_up(self, timeout_s: float) -> Welcome:
        """Waits until welcomed. Raises TransportError on timeout or when the server is closed first."""
        try:
            async with asyncio.timeout(timeout_s):
                while (welcome := self.welcome) is None:
                    if self._left_reason:
                        raise TransportError(self._left_reason)
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            raise TransportError(f"{self._server.name} did not answer within {timeout_s:g} s") from None
        return welcome

    def close(self) -> None:
        """The server receives Disconnected. Nothing more is delivered."""
        self.welcome = None
        self._on_message = _ignore
        self._server.put(self._peer, Disconnected(f"{self._peer.name} closed its connection"))

    def deliver(self, message: Any, *, urgent: bool = False) -> bool:
        """Called by the server to send to the connection; thread-safe. False when the queue is full or the loop has ended."""
        with self._lock:
            if len(self._outbox) >= QUEUE_LIMIT and not urgent:
                return False
            self._outbox.append(message)
            if not self._scheduled:
                try:
                    self._loop.call_soon_threadsafe(self._drain)
                except RuntimeError:  # the loop is closed
                    return False
                self._scheduled = True
        return True

    def _drain(self) -> None:
        with self._lock:
            messages = list(self._outbox)
            self._outbox.clear()
            self._scheduled = False
        for message in messages:
            if isinstance(message, Welcome):
                self.welcome = message
            elif isinstance(message, Disconnected):
                self.welcome = None
                self._left_reason = message.reason
            self._on_message(message)
        if messages:
            self._changed.set()


def _ignore(message: Any) -> None: ...

"""ZMQ sockets with a handshake: Server (bound, many named peers), Connection (one peer, reconnects), Poller.

Nobody outside transport/ sees zmq. Sends never block; queues are bounded; malformed frames are counted, logged, dropped.
Peers and servers come and go in the stream of messages itself: Hello / Welcome say "here", Left says "gone".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from transport.messages import Boot, EngineFacts, Role, Welcome, Wire


@dataclass(frozen=True)
class Left:
    """Not on the wire: the other side is gone (dead, silent, replaced, refused or too slow). Nothing sent to it will arrive."""

    reason: str


@dataclass(slots=True, eq=False)
class Peer:
    """One accepted connection of a Server; compared by identity. A reconnected process is a new Peer of the same name."""

    name: str
    role: Role
    epoch: int
    pid: int
    routing_id: bytes
    last_seen: float = 0.0  # time.monotonic() of its last frame
    gone: bool = False


class Source(Protocol):
    """What a Poller can wait for: sockets, connections, children, channels, wakers."""

    def poll_target(self) -> Any: ...  # a file descriptor or a zmq socket

    def tick(self, now: float) -> float: ...  # does what is due (heartbeats), returns time.monotonic() of the next call


class Server:
    """Bound side. `with` or close() it. One thread only."""

    progress: int  # stamped by the owner's loop; travels in Pong

    @classmethod
    def open(
        cls,
        boot: Boot,
        socket_name: str,
        accepts: Any,
        *,
        facts: EngineFacts | None = None,
        silence_s: float | None = 15.0,
    ) -> Server:
        """Binds `socket_name` (`engine-0.front`, `engine-0.workers`, `coordinator`) of this deployment.

        `accepts` is the union of what peers may send. A peer silent for `silence_s` is dropped (None: never; for peers
        that compute for long without polling). Raises ConfigError when the address is taken or not allowed.
        """
        raise NotImplementedError

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Accepted peers by name."""
        raise NotImplementedError

    def set_facts(self, facts: EngineFacts) -> None:
        """Facts sent in Welcome to peers that arrive from now on."""
        raise NotImplementedError

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]:
        """What has arrived, never blocking: (peer, message). A new peer's Hello comes first (it has been welcomed), and
        (peer, Left) last, exactly once."""
        raise NotImplementedError

    def send(self, peer: Peer, message: Wire) -> bool:
        """Queues `message`; False when the peer is gone or its queue is full (then it is dropped: Left follows)."""
        raise NotImplementedError

    def broadcast(self, message: Wire, role: Role | None = None) -> None:
        """Sends to every peer (of `role`); encodes once."""
        raise NotImplementedError

    def drop(self, peer: Peer, reason: str) -> None:
        """Forgets a peer; Left follows."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """received, sent, malformed, refused, gaps, dropped_peers since start."""
        raise NotImplementedError

    def poll_target(self) -> Any:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError

    def close(self, linger_s: float = 1.0) -> None:
        """Sends what is queued for at most `linger_s`, then closes."""
        raise NotImplementedError


class Connection:
    """Connecting side, for blocking loops. Connects in the background, says Hello, reconnects for ever."""

    welcome: Welcome | None  # of the present server; None while down

    @classmethod
    def open(cls, boot: Boot, socket_name: str, accepts: Any, *, silence_s: float | None = 15.0) -> Connection:
        raise NotImplementedError

    @property
    def is_up(self) -> bool:
        raise NotImplementedError

    def receive(self, limit: int = 1024) -> Iterator[Any]:
        """What has arrived, never blocking. Welcome comes first after each (re)connection (compare `epoch` with the last
        one to see a restart), Left when the server is gone, CallReply etc. in between."""
        raise NotImplementedError

    def send(self, message: Wire) -> bool:
        """Queues `message`; False when not welcomed or the queue is full. Nothing is kept for a later server."""
        raise NotImplementedError

    def wait_up(self, timeout_s: float) -> Welcome:
        """Blocks until welcomed. Raises TransportError on time-out or refusal (with the server's reason)."""
        raise NotImplementedError

    def poll_target(self) -> Any:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError

    def close(self, linger_s: float = 1.0) -> None:
        raise NotImplementedError


class AsyncConnection:
    """Connecting side on an asyncio loop: `on_message` is called in the loop, once per message, in order; it gets the
    same stream as Connection.receive (Welcome, messages, Left). It must be quick and must not raise."""

    welcome: Welcome | None

    @classmethod
    def open(
        cls,
        boot: Boot,
        socket_name: str,
        accepts: Any,
        on_message: Callable[[Any], None],
        *,
        silence_s: float | None = 15.0,
    ) -> AsyncConnection:
        """Call inside a running loop."""
        raise NotImplementedError

    @property
    def is_up(self) -> bool:
        raise NotImplementedError

    def send(self, message: Wire) -> bool:
        raise NotImplementedError

    async def wait_up(self, timeout_s: float) -> Welcome:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Waker:
    """Wakes a Poller from another thread (an eventfd). `set` is thread-safe; the poller's callback is called once."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def poll_target(self) -> int:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError

    def close(self) -> None: ...


class Poller:
    """Waits for any of its sources, and keeps their heartbeats going.

    poller.add(server, on_front); poller.add(channel, on_boot); while True: poller.wait(timeout_s)
    """

    def add(self, source: Source, on_readable: Callable[[], None]) -> None:
        raise NotImplementedError

    def remove(self, source: Source) -> None:
        raise NotImplementedError

    def wait(self, timeout_s: float | None) -> bool:
        """Sleeps until a source is readable (0: only looks), then calls their callbacks; True when any was called.

        Callbacks drain their source (`for ... in server.receive()`). Also called when heartbeats are due.
        """
        raise NotImplementedError

"""Server and AsyncConnection in one process, without sockets: for LLM() and tests. Messages pass by reference.

The server side lives in one thread, each connection in an asyncio loop of any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transport.messages import EngineFacts, Role, Welcome, Wire
from transport.sockets import Peer


class LocalServer:
    """Same methods as sockets.Server. `close(reason)` makes every connection see Left."""

    progress: int

    def __init__(self, name: str = "engine-0", *, facts: EngineFacts | None = None) -> None:
        raise NotImplementedError

    def connect(self, name: str, on_message: Callable[[Any], None]) -> LocalConnection:
        """Call inside a running asyncio loop; `on_message` runs there. Thread-safe."""
        raise NotImplementedError

    @property
    def peers(self) -> Mapping[str, Peer]:
        raise NotImplementedError

    def set_facts(self, facts: EngineFacts) -> None:
        raise NotImplementedError

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]:
        raise NotImplementedError

    def send(self, peer: Peer, message: Wire) -> bool:
        raise NotImplementedError

    def broadcast(self, message: Wire, role: Role | None = None) -> None:
        raise NotImplementedError

    def drop(self, peer: Peer, reason: str) -> None:
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        raise NotImplementedError

    def poll_target(self) -> int:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError

    def close(self, linger_s: float = 1.0) -> None:
        raise NotImplementedError


class LocalConnection:
    """Same methods as sockets.AsyncConnection."""

    welcome: Welcome | None

    @property
    def is_up(self) -> bool:
        raise NotImplementedError

    def send(self, message: Wire) -> bool:
        raise NotImplementedError

    async def wait_up(self, timeout_s: float) -> Welcome:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

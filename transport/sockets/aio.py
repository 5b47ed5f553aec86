"""AsyncConnection: transport/sockets/connection.py on an asyncio loop, for frontends and clients.

Separate from the blocking half, so that engines and workers do not pay for importing asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq

from trireme.errors import TransportError
from trireme.transport.sockets.connection import Connection
from trireme.transport.sockets.framing import SILENCE_S
from trireme.transport.wire.messages import Boot, Welcome, Wire


class AsyncConnection:
    """Connecting side on an asyncio loop: `on_message` is called in the loop, once per message, in order; it receives the
    same stream as Connection.receive (Welcome, messages, Disconnected). It must be quick.

    One reader on ZMQ's file descriptor serves all messages: no task and no future per message (measured against
    zmq.asyncio in docs/benchmarks/ipc-and-engine-core.md). That descriptor is edge-triggered, hence the look at EVENTS after
    every send and drain.
    """

    def __init__(self, link: Connection, on_message: Callable[[Any], None]) -> None:
        self._link = link
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._is_draining = False
        self._closed = False
        socket, monitor = link.poll_targets()
        self._fds: tuple[int, int] = (socket.getsockopt(zmq.FD), monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fds[0], self._drain)
        self._loop.add_reader(self._fds[1], self._tick)
        self._tick()

    @classmethod
    def open(
        cls,
        boot: Boot,
        socket_name: str,
        accepts: Any,
        on_message: Callable[[Any], None],
        *,
        silence_s: float | None = SILENCE_S,
    ) -> AsyncConnection:
        """Call inside a running loop; `on_message` is never called before this has returned. See Connection.open."""
        return cls(Connection(boot, socket_name, accepts, silence_s=silence_s), on_message)

    @property
    def welcome(self) -> Welcome | None:
        """The current server's Welcome; None while down."""
        return self._link.welcome

    @property
    def is_up(self) -> bool:
        return self._link.welcome is not None

    @property
    def server_progress(self) -> int:
        """The step counter in the server's last Pong."""
        return self._link.server_progress

    @property
    def server_stalled(self) -> str:
        """Why the server makes no progress, from its last Pong; "" when it does."""
        return self._link.server_stalled

    @property
    def silent_s(self) -> float:
        """Seconds for which the server has left a Ping unanswered."""
        return self._link.silent_s

    def counts(self) -> dict[str, int]:
        return self._link.counts()

    def send(self, message: Wire) -> bool:
        """Queues `message`; False when not welcomed or the queue is full. Nothing is kept for a later server."""
        queued = not self._closed and self._link.send(message)
        if queued and self._link.has_input():
            self._drain_soon()
        return queued

    async def wait_up(self, timeout_s: float) -> Welcome:
        """Waits until welcomed. Raises TransportError on timeout or refusal (with the server's reason)."""
        try:
            async with asyncio.timeout(timeout_s):
                while (welcome := self._link.welcome) is None:
                    self._link.raise_if_refused()
                    await self._changed.wait()
                    self._changed.clear()
        except TimeoutError:
            raise TransportError(f"{self._link.socket_name} did not answer within {timeout_s:g} s") from None
        return welcome

    def close(self) -> None:
        """Closes the connection and unregisters it from the loop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for fd in self._fds:
            self._loop.remove_reader(fd)
        if self._timer is not None:
            self._timer.cancel()
        self._link.close()

    def _is_closed(self) -> bool:
        return self._closed

    def _drain_soon(self) -> None:
        if not self._is_draining:
            self._is_draining = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Delivers a bounded number of messages, so that a flood cannot starve the loop, and reschedules itself for the rest."""
        self._is_draining = False
        if self._closed:
            return
        before = self._link.welcome, self._link.refusal
        try:
            for message in self._link.receive(limit=256):
                self._on_message(message)
                if self._is_closed():  # by on_message
                    break
        finally:
            if not self._is_closed() and self._link.has_input():
                self._drain_soon()
        if (self._link.welcome, self._link.refusal) != before:
            self._changed.set()

    def _tick(self) -> None:
        if self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        now = time.monotonic()
        due = self._link.tick(now)
        self._timer = self._loop.call_later(max(0.0, due - now), self._tick)
        self._drain_soon()

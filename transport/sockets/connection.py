"""The connecting side: finds its server, sends Hello, detects its death, and reconnects to the next one, forever.

For blocking loops; transport/sockets/aio.py puts it on asyncio. A dead server's connection is never reused: a new ZMQ connection
with a new routing id replaces it, so nothing stale can arrive on it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from trireme.errors import TransportError
from trireme.transport.sockets.address import CurveKeys, check_address, connect_address, guard_client
from trireme.transport.sockets.framing import GRACE_S, NOW, PING_S, SILENCE_S, Disconnected, FramedSocket, Identity
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.messages import PROTOCOL_VERSION, Boot, Hello, Ping, Pong, Refused, Welcome, Wire

log = logging.getLogger("trireme.transport")

RETRY_MIN_S, RETRY_MAX_S = 0.01, 0.5  # between connections that broke before a Welcome
HELLO_S = 10.0  # maximum wait for the answer to a Hello
PROBE_S = 0.5  # between Pings
ADDRESS_S = 0.05  # between checks for the address that a tcp server publishes


class Connection(FramedSocket):
    """Connecting side, for blocking loops. Connects in the background, sends Hello, reconnects forever. A Source for Poller."""

    def __init__(
        self,
        boot: Boot,
        socket_name: str,
        accepts: Any,
        *,
        silence_s: float | None = SILENCE_S,
    ) -> None:
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        super().__init__(socket, accepts | Welcome | Refused | Ping | Pong, Identity.from_boot(boot))
        self.welcome: Welcome | None = None  # of the current server; None while down
        self.refusal = ""  # why the last Hello was refused; empty after a Welcome
        self.server_progress = 0  # from the last Pong
        self.server_stalled = ""  # likewise
        self._unanswered = 0.0  # when the oldest Ping without a Pong was sent; 0: none
        self.socket_name = socket_name
        self._boot = boot
        self._silence_s = silence_s
        self._address: str | None = None
        self._num_sent = self._num_received = 0
        self._last_heard = 0.0
        self._retry_s = RETRY_MIN_S
        self._next_hello = 0.0
        self._next_ping = 0.0
        self._lost_reason, self._lost_due = "", 0.0
        self._events: deque[Any] = deque()
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 250)
        keys = CurveKeys.from_boot(boot)
        if keys:
            guard_client(socket, keys)
        self._connect()

    @classmethod
    def open(cls, boot: Boot, socket_name: str, accepts: Any, *, silence_s: float | None = SILENCE_S) -> Connection:
        """Starts to connect to `socket_name` of this deployment, whether or not its server is running yet.

        `accepts` is the union of what the server may send (the handshake is added). A server that has not answered for
        `silence_s` counts as gone (None: never).
        """
        return cls(boot, socket_name, accepts, silence_s=silence_s)

    @property
    def is_up(self) -> bool:
        return self.welcome is not None

    @property
    def silent_s(self) -> float:
        """Seconds for which the server has left a Ping unanswered; 0 while the owner itself was not polling."""
        now = time.monotonic()
        if not self._unanswered or now - self._last_tick > 2 * PROBE_S:
            return 0.0
        return now - self._unanswered

    def receive(self, limit: int = 1024) -> Iterator[Any]:
        """Received messages, never blocking. Welcome comes first after each (re)connection (compare `epoch` with the last one to
        detect a restart), Disconnected when the server is gone, everything else in between."""
        for _ in range(limit):
            while self._events:
                yield self._events.popleft()
            if not self._is_readable():
                break
            body = self._socket.recv(NOW)
            message = self._receive_one(body)
            if message is not None:
                yield message
        while self._events:
            yield self._events.popleft()

    def send(self, message: Wire) -> bool:
        """Queues `message`; False when not welcomed or the queue is full. Nothing is kept for a later server."""
        return self.welcome is not None and not self._lost_reason and self._send(message)

    def wait_up(self, timeout_s: float) -> Welcome:
        """Blocks until welcomed; consumes nothing. Raises TransportError on timeout or refusal (with the server's reason)."""
        poller = Poller()
        poller.add(self, lambda: self._events.extend(list(self.receive())))
        deadline = time.monotonic() + timeout_s
        while self.welcome is None:
            self.raise_if_refused()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransportError(f"{self.socket_name} did not answer within {timeout_s:g} s")
            poller.wait(left_s)
        return self.welcome

    def raise_if_refused(self) -> None:
        """Raises TransportError when the last Hello was refused."""
        if self.refusal:
            raise TransportError(f"{self.socket_name} refused {self.identity.name}: {self.refusal}")

    def has_input(self) -> bool:
        """True when receive() would yield something. For event loops, since ZMQ's wake-up is edge-triggered."""
        return bool(self._events) or bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def poll_targets(self) -> tuple[Any, ...]:
        return (self._socket, self._monitor)

    def acknowledge(self) -> bool:
        """True when the connection broke: tick reports that after a grace period, or reconnects."""
        return self._note_disconnection()

    def tick(self, now: float) -> float:
        """Hello while down, heartbeats while up. Called by Poller; never sleeps."""
        away = self._was_away(now)
        self._note_disconnection()
        if self._lost_reason:
            if now < self._lost_due:
                return self._lost_due
            self._go_down(self._lost_reason)
        if self.welcome is None:
            return self._tick_down(now)
        if away:
            self._last_heard, self._unanswered = now, 0.0
        elif self._silence_s is not None and now - self._last_heard > self._silence_s:
            self._go_down(f"{self.socket_name} was silent for {now - self._last_heard:.0f} s")
            return now
        if now >= self._next_ping:
            self._next_ping = now + PROBE_S
            if self._send(Ping(time.time_ns())) and not self._unanswered:
                self._unanswered = now
        return self._next_ping

    def close(self, linger_s: float = 1.0) -> None:
        """Closes; queued messages are still sent, for at most `linger_s`, while the process lives."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(0)
        super().close(linger_s)

    def _connect(self) -> None:
        """Opens a new ZMQ connection, with a new routing id, to the server's current address. The old one's queues are lost."""
        if self._address is not None:
            self._socket.disconnect(self._address)
        self._address = connect_address(self._boot, self.socket_name)
        if self._address is not None:
            check_address(self._address, CurveKeys.from_boot(self._boot))
            self._socket.connect(self._address)
        self._num_sent = self._num_received = 0

    def _tick_down(self, now: float) -> float:
        """Queues a Hello, which waits for the server to appear; repeated on a new connection if no answer comes."""
        if self._address is None or connect_address(self._boot, self.socket_name) != self._address:
            self._connect()
            self._next_hello = now if self._address is not None else now + ADDRESS_S
        if now >= self._next_hello:
            if self._num_sent:
                self._connect()
            me = self.identity
            self._send(Hello(PROTOCOL_VERSION, me.config_hash, me.role, me.name, me.epoch, me.pid))
            self._next_hello = now + HELLO_S
        return min(self._next_hello, now + (ADDRESS_S if self._boot.secret_keys else PING_S))

    def _send(self, message: Wire) -> bool:
        frames = self._encoder.encode(message)
        try:
            self._send_frames(frames, self._num_sent)
        except zmq.Again:
            return False
        self._num_sent += 1
        return True

    def _receive_one(self, body: bytes) -> Any | None:
        sequence, frames = self._receive_frames(body)
        if self.welcome is not None and (gap := self._note_gap(self.socket_name, self._num_received, sequence)):
            self._tear(gap)
            return None
        message = self._decode(frames, self.socket_name)
        self._last_heard = time.monotonic()
        self._num_received = sequence + 1
        match message:
            case None:
                self._tear(f"message {sequence} of {self.socket_name} arrived broken")
                return None
            case Welcome():
                return self._on_welcome(message)
            case Refused():
                self._on_refused(message.reason)
                return None
            case Ping():
                self._send(Pong(message.sent_ns))
                return None
            case Pong():
                self.server_progress, self.server_stalled = message.progress, message.stalled
                if message.sent_ns:
                    self._unanswered = 0.0
        return message if self.welcome is not None else None

    def _on_welcome(self, welcome: Welcome) -> Welcome | None:
        """Accepts a Welcome. A second one changes nothing, if it equals the first."""
        objection = self.identity.objection_to(welcome)
        if objection:
            self._on_refused(objection)
        if objection or self.welcome is not None:
            return None
        self.welcome = welcome
        self.server_stalled, self._unanswered = "", 0.0
        self.refusal = ""
        self._retry_s = RETRY_MIN_S
        self._next_ping = 0.0
        return welcome

    def _on_refused(self, reason: str) -> None:
        if self.welcome is not None:
            self._go_down(f"{self.socket_name} refused to go on: {reason}", is_torn=True)
            return
        self._counts.refused += 1
        if reason != self.refusal:
            log.warning("connection refused by=%s: %s", self.socket_name, reason)
        self.refusal = reason
        self._connect()
        self._next_hello = time.monotonic() + PING_S

    def _tear(self, reason: str) -> None:
        """Ends a connection whose stream is broken (a message lost or altered): on a new one the server starts afresh. If the
        server is known to be gone, that is the reason given: a successor's first messages may have arrived on its predecessor's
        connection."""
        self._note_disconnection()
        if self.welcome is None:
            self._connect()
            self._next_hello = time.monotonic() + RETRY_MAX_S
        elif self._lost_reason:
            self._go_down(self._lost_reason)
        else:
            self._go_down(reason, is_torn=True)

    def _go_down(self, reason: str, *, is_torn: bool = False) -> None:
        self.welcome = None
        self._lost_reason = ""
        self._next_hello = 0.0
        self._events.append(Disconnected(reason, is_torn))
        self._connect()

    def _note_disconnection(self) -> bool:
        """The other process closed the connection or died: while up that ends the connection, while down it is retried soon."""
        broken = False
        try:
            while True:
                self._monitor.recv_multipart(zmq.NOBLOCK)
                broken = True
        except zmq.Again:
            pass
        if not broken or self._lost_reason:
            return broken
        now = time.monotonic()
        if self.welcome is not None:
            # The server's last messages may still be in ZMQ's I/O thread.
            self._lost_reason, self._lost_due = f"{self.socket_name} closed its connection", now + GRACE_S
        elif not self.refusal:
            self._retry_s = min(self._retry_s * 2, RETRY_MAX_S)
            self._next_hello = min(self._next_hello, now + self._retry_s)
        return True

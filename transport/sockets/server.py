"""The bound side of a connection: many named peers, welcomed or refused, monitored, and dropped when dead, silent or slow.

One thread owns a Server. It must never block on a peer: queues are bounded, and a peer whose queue is full is dropped.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from trireme.errors import ConfigError
from trireme.transport.sockets.address import (
    CurveKeys,
    bind_address,
    check_address,
    guard_server,
    is_same_host,
    publish_address,
)
from trireme.transport.sockets.framing import (
    GRACE_S,
    NOW,
    NOW_AND_MORE,
    PING_S,
    QUEUE_LIMIT,
    SILENCE_S,
    Disconnected,
    FramedSocket,
    Identity,
)
from trireme.transport.wire.codec import Frame
from trireme.transport.wire.messages import (
    PROTOCOL_VERSION,
    Boot,
    EngineFacts,
    Hello,
    Ping,
    Pong,
    Refused,
    Role,
    Welcome,
    Wire,
)

log = logging.getLogger("trireme.transport")


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
    num_sent: int = 0
    num_received: int = 0
    pidfd: int = -1


class Server(FramedSocket):
    """Bound side. `with` or close() it. One thread only. A Source for Poller."""

    def __init__(
        self,
        address: str,
        accepts: Any,
        identity: Identity,
        *,
        keys: CurveKeys | None = None,
        facts: EngineFacts | None = None,
        silence_s: float | None = SILENCE_S,
    ) -> None:
        check_address(address, keys)
        context = zmq.Context() if keys else zmq.Context.instance()
        self._own_context = context if keys else None
        self._deaths = select.epoll()
        super().__init__(context.socket(zmq.ROUTER), accepts | Hello | Ping | Pong, identity)
        self.progress = 0  # stamped by the owner's loop; sent in Pong
        self.stalled = ""  # likewise
        self._facts = facts
        self._silence_s = silence_s
        self._same_host = is_same_host(address)
        self._peers: dict[str, Peer] = {}
        self._by_routing_id: dict[bytes, Peer] = {}
        self._by_pidfd: dict[int, Peer] = {}
        self._dying: list[tuple[float, Peer]] = []
        self._events: deque[tuple[Peer, Any]] = deque()
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if keys:
            guard_server(self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close(0)
            raise ConfigError(f"{identity.name} cannot listen on {address}: {error}") from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @classmethod
    def open(
        cls,
        boot: Boot,
        socket_name: str,
        accepts: Any,
        *,
        facts: EngineFacts | None = None,
        silence_s: float | None = SILENCE_S,
    ) -> Server:
        """Binds `socket_name` (`engine-0.front`, `engine-0.workers`, `coordinator`) of this deployment.

        `accepts` is the union of what peers may send (Hello, Ping and Pong are added). A peer silent for `silence_s` is
        dropped (None: never; for peers that compute for long without polling). Raises ConfigError when the address is
        taken or not allowed.
        """
        address = bind_address(boot, socket_name)
        identity = Identity.from_boot(boot)
        server = cls(address, accepts, identity, keys=CurveKeys.from_boot(boot), facts=facts, silence_s=silence_s)
        publish_address(boot, socket_name, server.address)
        return server

    @property
    def peers(self) -> Mapping[str, Peer]:
        """Accepted peers by name."""
        return self._peers

    def set_facts(self, facts: EngineFacts) -> None:
        """Facts sent in Welcome to peers that connect from now on."""
        self._facts = facts

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]:
        """Received messages as (peer, message), never blocking. A new peer's Hello comes first (it has been welcomed), and
        Disconnected last, exactly once."""
        self._collect_deaths()
        for _ in range(limit):
            while self._events:
                yield self._events.popleft()
            if not self._is_readable():
                break
            routing_id = self._socket.recv(NOW)
            peer, message = self._receive_one(routing_id)
            if peer is not None and message is not None:
                yield peer, message
        while self._events:
            yield self._events.popleft()

    def send(self, peer: Peer, message: Wire) -> bool:
        """Queues `message`; False when the peer is gone or its queue is full (then it is dropped: Disconnected follows)."""
        return self._send_encoded(peer, self._encoder.encode(message))

    def broadcast(self, message: Wire, role: Role | None = None) -> None:
        """Sends to every peer (of `role`); encodes once."""
        frames = self._encoder.encode(message)
        for peer in list(self._peers.values()):
            if role is None or peer.role == role:
                self._send_encoded(peer, frames)

    def drop(self, peer: Peer, reason: str, *, is_torn: bool = False) -> None:
        """Removes a peer and notifies it; Disconnected follows."""
        if not peer.gone:
            self._refuse(peer.routing_id, reason, peer.num_sent)
            self._forget(peer, reason, is_torn=is_torn)

    def poll_targets(self) -> tuple[Any, ...]:
        return (self._socket, self._deaths.fileno())

    def acknowledge(self) -> bool:
        """True when a peer's process died: its Disconnected is due after a grace period."""
        return bool(self._deaths.poll(0))

    def tick(self, now: float) -> float:
        """Heartbeats and overdue deaths. Called by Poller."""
        self._collect_deaths()
        away = self._was_away(now)
        for due, peer in self._dying:
            if due <= now:
                self._forget(peer, f"process {peer.pid} of {peer.name} died")
        self._dying = [(due, peer) for due, peer in self._dying if not peer.gone]
        for peer in list(self._peers.values()):
            if away:
                peer.last_seen = now
            elif self._silence_s is not None and now - peer.last_seen > self._silence_s:
                self.drop(peer, f"{peer.name} was silent for {now - peer.last_seen:.0f} s")
                continue
            if peer.pidfd < 0:  # no pidfd: the send itself detects whether the peer is still connected
                self.send(peer, Ping(time.time_ns()))
        return min([now + PING_S, *(due for due, _ in self._dying)])

    def close(self, linger_s: float = 1.0) -> None:
        """Closes; queued messages are still sent, for at most `linger_s`, while the process lives."""
        for pidfd in self._by_pidfd:
            os.close(pidfd)
        self._by_pidfd.clear()
        self._deaths.close()
        super().close(linger_s)
        if self._own_context is not None:
            self._own_context.term()
            self._own_context = None

    def _receive_one(self, routing_id: bytes) -> tuple[Peer | None, Any]:
        peer = self._by_routing_id.get(routing_id)
        sequence, frames = self._receive_frames(self._socket.recv())
        if peer is not None:
            if gap := self._note_gap(peer.name, peer.num_received, sequence):
                self.drop(peer, gap, is_torn=True)
                return None, None
            peer.num_received = sequence + 1
            peer.last_seen = time.monotonic()
        message = self._decode(frames, peer.name if peer else "a stranger")
        match message:
            case Hello():
                self._greet(routing_id, message, sequence)
            case Ping() if peer is not None:
                self.send(peer, Pong(message.sent_ns, self.progress, self.stalled))
            case Pong():
                pass
            case None if peer is not None:
                self.drop(peer, f"message {sequence} of {peer.name} arrived broken", is_torn=True)
            case _ if peer is None:
                self._refuse(routing_id, "say Hello first")
            case _:
                return peer, message
        return None, None

    def _greet(self, routing_id: bytes, hello: Hello, sequence: int) -> None:
        """Welcomes or refuses. A second Hello on the same connection is answered again and changes nothing, if it equals the
        first."""
        known = self._by_routing_id.get(routing_id)
        objection = self.identity.objection_to(hello)
        if known is not None:
            if objection:
                self.drop(known, objection, is_torn=True)
            else:
                self._send_welcome(known)
            return
        former = self._peers.get(hello.name)
        if not objection and former is not None and hello.epoch < former.epoch:
            objection = f"{hello.name} of epoch {hello.epoch} was replaced by epoch {former.epoch}"
        if objection:
            log.warning("refused a connection: %s", objection)
            self._refuse(routing_id, objection)
            return
        if former is not None:
            self._forget(former, f"{hello.name} connected anew")
        pidfd = self._watch(hello.pid) if self._same_host else -1
        peer = Peer(hello.name, hello.role, hello.epoch, hello.pid, routing_id, pidfd=pidfd)
        peer.last_seen = time.monotonic()
        peer.num_received = sequence + 1
        self._peers[peer.name] = self._by_routing_id[routing_id] = peer
        if pidfd >= 0:
            self._by_pidfd[pidfd] = peer
        self._events.append((peer, hello))
        self._send_welcome(peer)

    def _send_welcome(self, peer: Peer) -> None:
        me = self.identity
        self.send(
            peer, Welcome(PROTOCOL_VERSION, me.config_hash, me.role, me.name, me.epoch, me.pid, facts=self._facts)
        )

    def _refuse(self, routing_id: bytes, reason: str, sequence: int = 0) -> None:
        self._counts.refused += 1
        try:
            self._socket.send(routing_id, NOW_AND_MORE)
            self._send_frames(self._encoder.encode(Refused(reason)), sequence)
        except zmq.ZMQError:
            pass

    def _send_encoded(self, peer: Peer, frames: list[Frame]) -> bool:
        if peer.gone:
            return False
        try:
            self._socket.send(peer.routing_id, NOW_AND_MORE)
            self._send_frames(frames, peer.num_sent)
        except zmq.Again:
            self._forget(peer, f"{peer.name} left {QUEUE_LIMIT} messages unread")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(peer, f"{peer.name} closed its connection")
            return False
        peer.num_sent += 1
        return True

    def _watch(self, pid: int) -> int:
        """A pidfd in the epoll set, or -1 when `pid` cannot be watched (another host or namespace, already gone)."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return -1
        self._deaths.register(pidfd, select.EPOLLIN)
        return pidfd

    def _unwatch(self, pidfd: int) -> None:
        if pidfd >= 0:
            self._deaths.unregister(pidfd)
            os.close(pidfd)

    def _collect_deaths(self) -> None:
        if not self._by_pidfd:
            return
        for pidfd, _ in self._deaths.poll(0):
            peer = self._by_pidfd.pop(pidfd)
            self._unwatch(pidfd)
            peer.pidfd = -1
            self._dying.append((time.monotonic() + GRACE_S, peer))

    def _forget(self, peer: Peer, reason: str, *, is_torn: bool = False) -> None:
        if peer.gone:
            return
        peer.gone = True
        self._counts.dropped_peers += 1
        if self._by_pidfd.pop(peer.pidfd, None) is not None:
            self._unwatch(peer.pidfd)
        del self._by_routing_id[peer.routing_id]
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        self._events.append((peer, Disconnected(reason, is_torn)))

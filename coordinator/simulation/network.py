"""A network of connections in virtual time, with the semantics of transport/: ordered, greeted, lost as a whole, re-established.

A message is delivered unless its connection ends; then both sides eventually receive Disconnected and the connecting side
reconnects. There is no order between connections. Messages pass by reference. `ServerEnd` stands for Server, `ClientEnd` for
Connection and AsyncConnection.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from trireme.coordinator.simulation.timeline import NEVER, Process, Timeline
from trireme.transport.sockets.framing import QUEUE_LIMIT, SILENCE_S, Disconnected
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    EngineDown,
    EngineFacts,
    Hello,
    Load,
    Pong,
    Refused,
    Role,
    View,
    Welcome,
    Wire,
)

TOLERATED_TWICE = (Hello, Load, View, Abort)
Path: TypeAlias = tuple[str, str]
"""(name of the connecting process, name of the bound one)."""


class Channel:
    """One connection, from its Hello to its end. `lost` is the time from which nothing arrives any more."""

    __slots__ = ("client", "downward", "lost", "num_unread", "path", "peer", "server", "upward")

    def __init__(self, client: ClientEnd, server: ServerEnd, peer: Peer) -> None:
        self.client = client
        self.server = server
        self.peer = peer
        self.path = (client.process.name, server.process.name)
        self.lost = NEVER
        self.upward = self.downward = 0.0  # latest arrivals, by direction
        self.num_unread = 0  # in flight to the client, or in its inbox


class Network:
    """All connections of a world. `delay` draws the latency in seconds of one message on a path."""

    def __init__(
        self,
        timeline: Timeline,
        rng: random.Random,
        delay: Callable[[Path], float],
        *,
        twice: float = 0.0,
        most_unread: int = QUEUE_LIMIT,
    ) -> None:
        self.timeline = timeline
        self.rng = rng
        self.delay = delay
        self.twice = twice  # probability of duplicating a message that may be duplicated
        self.most_unread = most_unread
        self.servers: dict[str, ServerEnd] = {}
        self.clients: list[ClientEnd] = []
        self.num_lost = 0
        self.note: Callable[[str, str, Any], object] | None = None  # (from, to, what), for a trace
        self._clogged: dict[Path, list[tuple[Channel, bool, Any]]] = {}
        self._clogged_at: dict[Path, float] = {}
        self._num_peers = 0

    # ------------------------------------------------------------ endpoints

    def bind(self, process: Process, role: Role, facts: EngineFacts | None = None) -> ServerEnd:
        """`process` listens under its name. Clients waiting for it connect soon."""
        server = self.servers[process.name] = ServerEnd(self, process, role, facts)
        for client in self.clients:
            if client.target == process.name and client.channel is None:
                client.connect_soon()
        return server

    def connect(self, process: Process, role: Role, target: str) -> ClientEnd:
        client = ClientEnd(self, process, role, target)
        self.clients.append(client)
        client.connect_soon()
        return client

    def channels(self) -> list[Channel]:
        """Channels that the connecting side still uses."""
        return [client.channel for client in self.clients if client.channel is not None and client.process.is_alive]

    # ------------------------------------------------------------ messages

    def carry(self, channel: Channel, up: bool, message: Any) -> None:
        """Sends a message."""
        if channel.lost <= self.timeline.now:
            self.num_lost += 1
            return
        held = self._clogged.get(channel.path)
        if held is not None:
            held.append((channel, up, message))
            return
        if self.twice and isinstance(message, TOLERATED_TWICE) and self.rng.random() < self.twice:
            self._send(channel, up, message)
        self._send(channel, up, message)

    def _send(self, channel: Channel, up: bool, message: Any) -> None:
        when = self.timeline.now + self.delay(channel.path)
        if up:
            channel.upward = when = max(when, channel.upward)
        else:
            channel.downward = when = max(when, channel.downward)
        self.timeline.at(when, self._arrive, channel, up, message)

    def _arrive(self, channel: Channel, up: bool, message: Any) -> None:
        if channel.lost <= self.timeline.now:
            self.num_lost += 1
        elif up:
            channel.server.take_in(channel.peer, message)
        else:
            channel.client.take_in(channel, message)

    # ------------------------------------------------------------ faults

    def lose(self, channel: Channel, *, notice_s: float | None = None, lingers: bool = False) -> None:
        """Breaks the connection: messages in flight may still arrive for a moment, with `lingers` all that the bound side has sent.
        The connecting side notices in `notice_s`; the bound one when it sends, when the peer reconnects, or by silence."""
        if channel.lost < NEVER:
            return
        now, rng = self.timeline.now, self.rng
        channel.lost = now + (rng.random() * 0.02 if rng.random() < 0.5 else 0.0)
        if lingers:
            channel.lost = max(now, channel.downward) + 1e-6
        notice = 0.03 + rng.random() * 0.97 if notice_s is None else notice_s
        self.timeline.at(max(now + notice, channel.lost), channel.client.hear_loss, channel, "closed its connection")
        self.timeline.after(SILENCE_S + rng.random(), channel.server.hear_silence, channel.peer)

    def end_process(self, process: Process, notice_s: Callable[[], float], *, lingers: bool = False) -> None:
        """A process is gone: each of its connections ends, and each peer notices after its own delay."""
        server = self.servers.get(process.name)
        if server is not None and server.process is process:
            del self.servers[process.name]
        for client in list(self.clients):
            channel = client.channel
            if client.process is process:
                self.clients.remove(client)
                if channel is not None:
                    channel.lost = min(channel.lost, self.timeline.now + self.rng.random() * 0.01)
                    after = max(channel.lost - self.timeline.now, notice_s())
                    self.timeline.after(after, channel.server.hear_end, channel.peer, f"{process.name} died")
            elif channel is not None and channel.server.process is process:
                self.lose(channel, notice_s=notice_s(), lingers=lingers)

    def clog(self, path: Path) -> None:
        """Nothing passes on this path until `unclog`; after long silence both sides give up the connection."""
        if path in self._clogged:
            return
        held: list[tuple[Channel, bool, Any]] = []
        self._clogged[path], self._clogged_at[path] = held, self.timeline.now
        self.timeline.after(SILENCE_S + self.rng.random(), self._silence, path, held, True)
        self.timeline.after(SILENCE_S + self.rng.random(), self._silence, path, held, False)

    def unclog(self, path: Path) -> None:
        """Delivers the held messages now, in order."""
        self._clogged_at.pop(path, None)
        for channel, up, message in self._clogged.pop(path, ()):
            if channel.lost > self.timeline.now:
                self._send(channel, up, message)

    def silent_s(self, channel: Channel) -> float:
        """Seconds in which the bound side of a connection could not answer."""
        server = channel.server.process
        since = server.frozen_from if server.is_frozen else NEVER
        return max(0.0, self.timeline.now - min(since, self._clogged_at.get(channel.path, NEVER)))

    def frozen(self, process: Process) -> None:
        """`process` stops from now on: peers that wait too long give it up."""
        since = process.frozen_from
        for channel in self.channels():
            if channel.client.process is process:
                self.timeline.after(SILENCE_S + self.rng.random(), self._drop_frozen, channel, process, since)
            elif channel.server.process is process:
                self.timeline.after(SILENCE_S + self.rng.random(), self._leave_frozen, channel, process, since)

    def _silence(self, path: Path, held: list[Any], client_side: bool) -> None:
        if self._clogged.get(path) is not held:
            return
        for channel in self.channels():
            if channel.path == path:
                if client_side:
                    channel.client.hear_loss(channel, "was silent")
                else:
                    channel.server.hear_silence(channel.peer)

    def _drop_frozen(self, channel: Channel, process: Process, since: float) -> None:
        if process.is_frozen and process.frozen_from == since:
            channel.server.hear_silence(channel.peer)

    def _leave_frozen(self, channel: Channel, process: Process, since: float) -> None:
        if process.is_frozen and process.frozen_from == since:
            channel.client.hear_loss(channel, "was silent")

    def new_routing_id(self) -> bytes:
        self._num_peers += 1
        return self._num_peers.to_bytes(4, "little")


class ServerEnd:
    """The bound side. Same methods as transport.sockets.names.Server, as far as the loops use them."""

    def __init__(self, network: Network, process: Process, role: Role, facts: EngineFacts | None) -> None:
        self.process = process
        self.progress = 0
        self.stalled = ""
        self.num_dropped = 0
        self.on_heard: Callable[[Peer, Any], object] | None = None  # observes messages received by the owner
        self.on_sent: Callable[[Peer, Any], object] | None = None  # observes messages sent by the owner
        self._network = network
        self._role = role
        self._facts = facts
        self._peers: dict[str, Peer] = {}
        self._channels: dict[bytes, Channel] = {}
        self._inbox: deque[tuple[Peer, Any]] = deque()

    @property
    def peers(self) -> dict[str, Peer]:
        return self._peers

    @property
    def has_input(self) -> bool:
        return bool(self._inbox)

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]:
        """Yields (peer, message) for everything that has arrived; `limit` is ignored."""
        inbox, note = self._inbox, self._network.note
        while inbox:
            for peer, message in self._found(*inbox.popleft()):
                if self.on_heard is not None:
                    self.on_heard(peer, message)
                if note is not None:
                    note(peer.name, self.process.name, message)
                yield peer, message

    def send(self, peer: Peer, message: Wire) -> bool:
        """Sends to a peer. False when its connection is gone or too many of its messages are unread; the peer is then forgotten."""
        if peer.gone:
            return False
        channel = self._channels[peer.routing_id]
        if channel.lost <= self._network.timeline.now:
            self._forget(peer, f"{peer.name} closed its connection")
            return False
        if channel.num_unread >= self._network.most_unread:
            self._forget(peer, f"{peer.name} left {channel.num_unread} messages unread")
            self._network.timeline.after(1.0, channel.client.hear_loss, channel, "refused to go on")
            return False
        channel.num_unread += 1
        if self.on_sent is not None:
            self.on_sent(peer, message)
        self._network.carry(channel, False, message)
        return True

    def broadcast(self, message: Wire, role: Any = None) -> None:
        for peer in list(self._peers.values()):
            if role is None or peer.role == role:
                self.send(peer, message)

    def counts(self) -> dict[str, int]:
        return {"dropped_peers": self.num_dropped}

    # ------------------------------------------------------------ called by the network

    def greeted_by(self, channel: Channel) -> None:
        """A Hello is in flight."""
        self._channels[channel.peer.routing_id] = channel

    def take_in(self, peer: Peer, message: Any) -> None:
        if self.process.is_alive:
            self._inbox.append((peer, message))
            self.process.wake()

    def hear_end(self, peer: Peer, reason: str) -> None:
        """The peer's process has died."""
        if not peer.gone and self._peers.get(peer.name) is peer:
            self._forget(peer, reason)
        self._channels.pop(peer.routing_id, None)

    def hear_silence(self, peer: Peer) -> None:
        """Disconnects a peer that was silent for too long; it learns so when it listens again. A frozen server notices nothing."""
        if peer.gone or self.process.is_frozen or self._peers.get(peer.name) is not peer:
            return
        channel = self._channels[peer.routing_id]
        self._forget(peer, f"{peer.name} was silent")
        delay_s = self._network.delay(channel.path)
        self._network.timeline.after(delay_s, channel.client.hear_loss, channel, "refused to go on")

    def _found(self, peer: Peer, message: Any) -> list[tuple[Peer, Any]]:
        """What the owner sees of an arrived message."""
        if isinstance(message, Hello):
            return self._greet(peer, message)
        is_known = isinstance(message, Disconnected) or (not peer.gone and self._peers.get(peer.name) is peer)
        return [(peer, message)] if is_known else []

    def _greet(self, peer: Peer, hello: Hello) -> list[tuple[Peer, Any]]:
        former = self._peers.get(peer.name)
        channel = self._channels.get(peer.routing_id)
        if former is peer:
            self._welcome(peer)
            return []
        if peer.gone or channel is None or channel.lost <= self._network.timeline.now:
            return []
        if former is not None and hello.epoch < former.epoch:
            self._network.carry(channel, False, Refused(f"{peer.name} was replaced"))
            return []
        left: list[tuple[Peer, Any]] = []
        if former is not None:
            self._forget(former, f"{peer.name} connected anew", announce=False)
            left = [(former, Disconnected(f"{peer.name} connected anew"))]
        self._peers[peer.name] = peer
        self._welcome(peer)
        return [*left, (peer, hello)]

    def _welcome(self, peer: Peer) -> None:
        me = self.process
        self.send(peer, Welcome(PROTOCOL_VERSION, b"", self._role, me.name, me.epoch, 0, self._facts))

    def _forget(self, peer: Peer, reason: str, *, announce: bool = True) -> None:
        peer.gone = True
        self.num_dropped += 1
        self._channels.pop(peer.routing_id, None)
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
        if announce and self.process.is_alive:
            self._inbox.append((peer, Disconnected(reason)))
            self.process.wake()


class ClientEnd:
    """The connecting side. Same methods as transport.sockets.names.Connection; `on_message` makes it an AsyncConnection."""

    def __init__(self, network: Network, process: Process, role: Role, target: str) -> None:
        self.process = process
        self.target = target
        self.channel: Channel | None = None
        self.welcome: Welcome | None = None
        self.server_progress = 0
        self.server_stalled = ""
        self.num_losses = 0
        self.on_message: Callable[[Any], object] | None = None
        self._network = network
        self._role = role
        self._inbox: deque[tuple[Channel, Any]] = deque()
        self._closed = False

    @property
    def is_up(self) -> bool:
        return self.welcome is not None

    @property
    def silent_s(self) -> float:
        """Seconds since heartbeats were last answered."""
        return self._network.silent_s(self.channel) if self.channel is not None else 0.0

    @property
    def has_input(self) -> bool:
        return bool(self._inbox)

    def send(self, message: Wire) -> bool:
        if self.welcome is None or self.channel is None:
            return False
        self._network.carry(self.channel, True, message)
        return True

    def receive(self, limit: int = 1024) -> Iterator[Any]:
        """Yields what has arrived on the current connection; reconnects after a Disconnected. `limit` is ignored."""
        inbox = self._inbox
        while inbox:
            channel, message = inbox.popleft()
            channel.num_unread -= not isinstance(message, Disconnected)
            if channel is not self.channel:
                continue
            if isinstance(message, Disconnected):
                self.channel = None
                self.connect_soon()
                if self.welcome is None:
                    continue
                self.welcome, self.server_stalled = None, ""
                self.num_losses += 1
            elif isinstance(message, Pong):
                self.server_progress, self.server_stalled = message.progress, message.stalled
            elif isinstance(message, EngineDown):
                self.num_losses += 1
            elif isinstance(message, Welcome):
                if self.welcome is not None:
                    continue
                self.welcome = message
            elif self.welcome is None:
                continue
            if self._network.note is not None:
                self._network.note(self.target, self.process.name, message)
            yield message

    def dispatch(self) -> None:
        """Passes arrived messages to `on_message`."""
        assert self.on_message is not None
        for message in self.receive():
            self.on_message(message)

    def counts(self) -> dict[str, int]:
        return {"gaps": 0}

    def close(self, linger_s: float = 1.0) -> None:
        self._closed = True

    # ------------------------------------------------------------ called by the network

    def connect_soon(self) -> None:
        self._network.timeline.after(0.01 + self._network.rng.random() * 0.24, self._connect)

    def take_in(self, channel: Channel, message: Any) -> None:
        if self.process.is_alive and not self._closed:
            self._inbox.append((channel, message))
            self.process.wake()

    def hear_loss(self, channel: Channel, reason: str) -> None:
        """The connection is over for this side, from its next look at the inbox."""
        if channel is self.channel and self.process.is_alive:
            channel.lost = min(channel.lost, self._network.timeline.now)
            self._inbox.append((channel, Disconnected(f"{self.target} {reason}")))
            self.process.wake()

    def _connect(self) -> None:
        server = self._network.servers.get(self.target)
        if server is None or self.channel is not None or not self.process.is_alive or self._closed:
            return  # `bind` calls this again
        me = self.process
        peer = Peer(me.name, self._role, me.epoch, 0, self._network.new_routing_id())
        self.channel = channel = Channel(self, server, peer)
        server.greeted_by(channel)
        self._network.carry(channel, True, Hello(PROTOCOL_VERSION, b"", self._role, me.name, me.epoch, 0))

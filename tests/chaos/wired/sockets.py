"""ZMQ sockets of one process that harm a message when told to: lose, hold, swap, repeat, cut, alter or inflate it.

`install` makes them the sockets of this process, and listens in the run directory for orders (tests/chaos/messages.py sends
them). What is harmed is what goes out, whole messages at a time, after the product has framed it.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import zmq

from trireme.transport.sockets.framing import HEAD_BYTES, head_of
from trireme.transport.wire.codec import MAX_FRAME_BYTES, encode
from trireme.transport.wire.messages import PROTOCOL_VERSION, Boot, Hello, Welcome

HEARTBEATS = (b"\xa4Ping", b"\xa4Pong")
HELD_S = 2.0
DONE_S = 5.0  # for a message to come by that can be harmed

Message = list[Any]


class Order:
    """Harm one message that leaves by `link` (front, workers, coordinator), after `skip` others."""

    def __init__(self, kind: str, link: str, skip: int, seed: int) -> None:
        self.kind, self.link, self.skip = kind, link, skip
        self.rng = random.Random(seed)
        self.done = threading.Event()


class Orders:
    """The one that waits to be carried out. Set by the listening thread, taken by the sockets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._order: Order | None = None

    def set(self, order: Order | None) -> None:
        with self._lock:
            self._order = order

    def take(self, link: str, message: Message) -> Order | None:
        with self._lock:
            order = self._order
            if order is None or order.link != link or is_heartbeat(message):
                return None
            if order.skip:
                order.skip -= 1
                return None
            self._order = None
            order.done.set()
            return order


def is_heartbeat(message: Message) -> bool:
    return any(bytes(part[:32]).find(word) >= 0 for part in message[:2] for word in HEARTBEATS)


class Outlet:
    """What one socket sends, in order, to one peer: whole messages that wait for their time."""

    def __init__(self) -> None:
        self.held: deque[Message] = deque()
        self.due = 0.0
        self.swaps = False  # the message that comes next goes first


def socket_class(orders: Orders, boot: Boot) -> type[zmq.Socket[bytes]]:
    """A class of sockets that obey `orders`."""

    class HarmfulSocket(zmq.Socket[bytes]):
        link = ""
        parts: Message = []
        outlets: dict[bytes, Outlet] = {}

        def bind(self, address: str) -> Any:
            self._begin(address)
            return super().bind(address)

        def connect(self, address: str) -> Any:
            self._begin(address)
            return super().connect(address)

        def _begin(self, address: str) -> None:
            self.link = address.rpartition(".")[2] if "." in address else address.rpartition("/")[2]
            self.parts, self.outlets = [], {}

        def send(self, data: Any, flags: int = 0, copy: bool = True, **options: Any) -> Any:
            if not self.link:
                return super().send(data, flags, copy, **options)
            self.parts.append(data)
            if not flags & zmq.SNDMORE:
                message, self.parts = self.parts, []
                self._take(message)
            return None

        def get(self, option: int) -> Any:
            """Whoever looks for messages lets those go out whose time has come."""
            if self.link and option == zmq.EVENTS:
                self._flush()
            return super().get(option)

        def _take(self, message: Message) -> None:
            to = bytes(message[0]) if self.socket_type == zmq.ROUTER else b""
            outlet = self.outlets.setdefault(to, Outlet())
            order = orders.take(self.link, message)
            if order is not None:
                self._harm(order, outlet, message)
            elif outlet.swaps:
                self._put(message)
                outlet.swaps = False
                self._put(outlet.held.popleft())
            elif outlet.held:
                outlet.held.append(message)
                self._flush()
            else:
                self._put(message)

        def _harm(self, order: Order, outlet: Outlet, message: Message) -> None:
            match order.kind:
                case "drop":
                    pass
                case "delay":
                    outlet.due = time.monotonic() + HELD_S
                    outlet.held.append(message)
                case "reorder":
                    outlet.swaps = True
                    outlet.held.append(message)
                case "duplicate":
                    self._put(message)
                    self._put(message)
                case _:
                    at = 1 if self.socket_type == zmq.ROUTER else 0
                    self._put(altered(order, message, at, boot))

        def _flush(self) -> None:
            for outlet in self.outlets.values():
                while outlet.held and not outlet.swaps and outlet.due <= time.monotonic():
                    self._put(outlet.held.popleft())

        def _put(self, message: Message) -> None:
            for part in message[:-1]:
                super().send(part, zmq.NOBLOCK | zmq.SNDMORE)
            super().send(message[-1], zmq.NOBLOCK)

    return HarmfulSocket


def altered(order: Order, message: Message, at: int, boot: Boot) -> Message:
    """The message with one of its own parts (from `at` on) changed; what is before addresses it."""
    address, parts = message[:at], [bytes(part) for part in message[at:]]
    head = parts[0][:HEAD_BYTES]
    match order.kind:
        case "truncate":
            parts[-1] = parts[-1][: order.rng.randrange(len(parts[-1]))]
        case "flip":
            which = order.rng.randrange(len(parts))
            body = bytearray(parts[which])
            body[order.rng.randrange(len(body))] ^= 1 << order.rng.randrange(8)
            parts[which] = bytes(body)
        case "version":
            kind = Welcome if at else Hello
            greeting = kind(PROTOCOL_VERSION + 1, boot.config_hash, boot.role, boot.name, boot.epoch, 1)
            frames = encode(greeting)
            parts = [head_of(int.from_bytes(head[:4], "little"), frames) + bytes(frames[0])]
        case "oversize":
            parts = [head + bytes(MAX_FRAME_BYTES + 1)]
        case kind:
            raise ValueError(f"no harm of the kind {kind!r}")
    return address + parts


def install(boot: Boot) -> None:
    """Call in a process's main before anything of the product opens a socket."""
    orders = Orders()
    zmq.Context._socket_class = socket_class(orders, boot)  # type: ignore[assignment]
    path = control_path(boot.run_dir, boot.name)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(4)
    threading.Thread(target=_listen, args=(listener, orders), daemon=True).start()


def control_path(run_dir: str, name: str) -> Path:
    return Path(run_dir, f"chaos.{name}")


def _listen(listener: socket.socket, orders: Orders) -> None:
    """One order at a time; answers whether it could be carried out."""
    while True:
        with listener.accept()[0] as link:
            order = Order(**json.loads(link.recv(4096)))
            orders.set(order)
            is_done = order.done.wait(DONE_S)
            orders.set(None)
            link.send(b"1" if is_done else b"0")

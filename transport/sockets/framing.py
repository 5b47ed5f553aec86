"""Shared by both sides of a connection: identity, framing, sequence numbers, counters.

Base of Server and Connection, and used by nobody else. Must never block.

On the wire a message is [sequence number u32, checksum u32, msgpack body][array]...; numbers count from 0 per connection. A
message that is lost, repeated, out of order or altered ends its connection: both sides begin afresh, and neither continues with
less, or with other, than what was sent.
"""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from zlib import crc32

import zmq

from trireme.errors import ProtocolError
from trireme.transport.wire.codec import MAX_FRAME_BYTES, Frame, MessageDecoder, MessageEncoder
from trireme.transport.wire.messages import PROTOCOL_VERSION, Boot, Hello, Role, Welcome

log = logging.getLogger("trireme.transport")

QUEUE_LIMIT = 4096  # messages queued per peer and direction
PING_S = 1.0
SILENCE_S = 15.0
GRACE_S = 0.03  # a dead process's last messages may still arrive after its pidfd fires
HEAD_BYTES = 8
_HEAD = struct.Struct("<II")
SEQUENCE_MASK = 0xFFFF_FFFF
READABLE = int(zmq.POLLIN)  # arithmetic on members of an enumeration is slow
NOW, NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)  # combining zmq's enums costs more than sending


@dataclass(frozen=True)
class Disconnected:
    """Not on the wire: the other side is gone (dead, silent, replaced, refused or too slow). Nothing sent to it will arrive.
    `is_torn`: it lives as far as is known, but a message between the two was broken or rejected."""

    reason: str
    is_torn: bool = False


@dataclass(frozen=True)
class Identity:
    """Who this process is in a handshake."""

    role: Role
    name: str
    epoch: int
    config_hash: bytes
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def from_boot(cls, boot: Boot) -> Identity:
        return cls(boot.role, boot.name, boot.epoch, boot.config_hash)

    def objection_to(self, other: Hello | Welcome) -> str:
        """Why this process must not communicate with `other`; empty when it may."""
        if other.protocol != PROTOCOL_VERSION:
            return (
                f"{other.name} speaks protocol version {other.protocol}, {self.name} speaks {PROTOCOL_VERSION}: "
                "both must run the same release"
            )
        if other.config_hash != self.config_hash and not (other.role == "admin" and not other.config_hash):
            return f"{other.name} was started with another configuration than {self.name} (hashes differ)"
        return ""


class Counts:
    """Plain counters of one socket, for statistics and tests."""

    def __init__(self) -> None:
        self.received = self.sent = self.malformed = self.refused = self.gaps = self.dropped_peers = 0

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class FramedSocket:
    """Common base: framing, pidfds, context manager. One thread only."""

    def __init__(self, socket: zmq.Socket[bytes], accepts: Any, identity: Identity) -> None:
        self.identity = identity
        self._counts = Counts()
        self._encoder = MessageEncoder()
        self._decoder = MessageDecoder(accepts)
        self._last_tick = time.monotonic()
        self._logged = {"malformed": 0.0, "gaps": 0.0}  # time of the last log line
        self._socket = socket
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = QUEUE_LIMIT
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + HEAD_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)

    def counts(self) -> dict[str, int]:
        """received, sent, malformed, refused, gaps (messages lost or out of order), dropped_peers, since start."""
        return self._counts.as_dict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, linger_s: float = 1.0) -> None:
        """Closes; queued messages are still sent, for at most `linger_s`, while the process lives."""
        if not self._socket.closed:
            self._socket.close(linger=int(linger_s * 1000))

    def _is_readable(self) -> bool:
        """Whether a message is waiting: checking is cheaper than the exception of an empty receive."""
        return int(self._socket.get(zmq.EVENTS)) & READABLE != 0

    def _send_frames(self, frames: list[Frame], sequence: int) -> None:
        """Raises zmq.Again when the queue is full. Only the first part of a message can fail."""
        flags = NOW if len(frames) == 1 else NOW_AND_MORE
        self._socket.send(head_of(sequence & SEQUENCE_MASK, frames) + frames[0], flags)
        for array in frames[1:-1]:
            self._socket.send(array, zmq.SNDMORE, copy=False)
        if len(frames) > 1:
            self._socket.send(frames[-1], 0, copy=False)
        self._counts.sent += 1

    def _receive_frames(self, body: bytes) -> tuple[int, list[Frame]]:
        """Completes a message whose first frame is `body`: its sequence number, and its frames if they match the checksum."""
        frames: list[Frame] = [memoryview(body)[HEAD_BYTES:]]
        while self._socket.getsockopt(zmq.RCVMORE):
            frames.append(self._socket.recv(copy=False).buffer)
        self._counts.received += 1
        if len(body) < HEAD_BYTES:
            return 0, []
        sequence, checksum = _HEAD.unpack_from(body)
        return sequence, frames if checksum == _checksum_of(sequence, frames) else []

    def _decode(self, frames: list[Frame], sender: str) -> Any | None:
        """The message, or None after counting and logging a malformed one. No frames: the checksum did not match."""
        try:
            if not frames:
                raise ProtocolError("its checksum does not fit")
            return self._decoder.decode(frames)
        except ProtocolError as error:
            self._counts.malformed += 1
            if self._may_log("malformed"):
                log.warning("dropped a malformed message from=%s count=%d: %s", sender, self._counts.malformed, error)
            return None

    def _may_log(self, what: str) -> bool:
        """Limits logging to one line a second, whatever a peer sends."""
        now = time.monotonic()
        if now - self._logged[what] < 1.0:
            return False
        self._logged[what] = now
        return True

    def _was_away(self, now: float) -> bool:
        """True when the owner has not ticked for so long that the silence may be its own fault."""
        away = now - self._last_tick > 2.5 * PING_S
        self._last_tick = now
        return away

    def _note_gap(self, sender: str, expected: int, sequence: int) -> str:
        """Why this sequence number is not the expected one; "" when it is."""
        lost = (sequence - expected) & SEQUENCE_MASK
        if not lost:
            return ""
        is_ahead = lost <= SEQUENCE_MASK // 2
        self._counts.gaps += lost if is_ahead else 1
        if self._may_log("gaps"):
            log.warning("messages lost from=%s expected=%d got=%d", sender, expected, sequence)
        return f"message {expected & SEQUENCE_MASK} of {sender} is missing: number {sequence} came"


def head_of(sequence: int, frames: Sequence[Frame]) -> bytes:
    """The header before the body: the sequence number, and a checksum over it and all frames."""
    return _HEAD.pack(sequence, _checksum_of(sequence, frames))


def _checksum_of(sequence: int, frames: Sequence[Frame]) -> int:
    checksum = crc32(frames[0], sequence)
    if len(frames) > 1:
        for frame in frames[1:]:
            checksum = crc32(frame, checksum)
    return checksum

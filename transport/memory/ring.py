"""A ring of messages in shared memory, from one process to others of its host: each is written once, whatever the readers' number.

One process, the owner, makes the memory and a pipe for each reader, and gives `Ring.place` to the others. A message fills an
entry, and a byte in each pipe announces it: a reader takes as many entries as it has read bytes, so that it sleeps like any other
Source, and the kernel orders what it sees. No locks: an entry is written anew only when every reader has moved past it. A message
that has no room is sent by the sockets of the same processes; its entry says so, and `RingReceiver` keeps the order. When a reader
is ENTRIES - 1 messages behind, that is so for all later messages.

The processes trust each other; what is read is checked like any message, and by its number.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from trireme.errors import ProtocolError
from trireme.transport.wire.codec import MAX_FRAMES, Frame, MessageDecoder, MessageEncoder
from trireme.transport.wire.messages import RingPlace, Wire

ENTRIES = 32  # more than orders of a few steps in flight
ENTRY_BYTES = 64 << 10  # a step of 256 sequences takes 5 KiB
LINE = 128  # a pair of cache lines: what different processes write shares none
POSITION_STEP = LINE // 8
_ENTRY = struct.Struct("<QII")  # number of the message, kind, number of frames
HERE, BY_SOCKET, ALL_BY_SOCKET = 1, 2, 3  # kinds of entries: where the message is, and all later ones
NEVER = float("inf")


class RingMessage(NamedTuple):
    """What an entry holds: its kind, and its frames if they are here."""

    kind: int
    frames: list[bytes]


def is_supported() -> bool:
    """Whether the order of a process's writes is the order in which others see them, as on x86, and Linux's memory files exist."""
    return platform.machine().lower() in ("x86_64", "amd64") and hasattr(os, "memfd_create")


def _layout(num_readers: int) -> tuple[int, int]:
    """Offset of the first entry, and the total, in bytes. Before the entries is a line for each reader's position."""
    first = num_readers * LINE
    return first, first + ENTRIES * ENTRY_BYTES


class Ring:
    """The owner's side: memory and pipes. Others open `place` while this process lives."""

    def __init__(self, num_readers: int) -> None:
        """Raises OSError where the system gives no memory or descriptors."""
        self._num_readers = num_readers
        _, total = _layout(num_readers)
        with contextlib.ExitStack() as undo:
            self._memory_fd = os.memfd_create("trireme-ring", os.MFD_CLOEXEC)
            undo.callback(os.close, self._memory_fd)
            os.ftruncate(self._memory_fd, total)
            self._bells: list[tuple[int, int]] = []
            for _ in range(num_readers):
                self._bells.append(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
                for end in self._bells[-1]:
                    undo.callback(os.close, end)
            self._undo = undo.pop_all()

    def place(self, reader: int, *, writes: bool = False) -> RingPlace:
        """What another process opens to read as number `reader`, or to write to this one."""
        bells = [self._path(pair[1]) for pair in self._bells] if writes else [self._path(self._bells[reader][0])]
        return RingPlace(self._path(self._memory_fd), bells, reader, self._num_readers)

    def sender(self) -> RingSender:
        """To write in this process; it may be closed before the ring."""
        return RingSender(self.place(0, writes=True))

    def receiver(self, reader: int, accepts: Any) -> RingReceiver:
        """To read in this process; it may be closed before the ring."""
        return RingReceiver(self.place(reader), accepts)

    def close(self) -> None:
        """Drops memory and pipes; may be called twice."""
        self._undo.close()

    @staticmethod
    def _path(fd: int) -> str:
        return f"/proc/{os.getpid()}/fd/{fd}"


class _Side:
    """The memory and the pipes of one process that uses a ring."""

    def __init__(self, place: RingPlace, flags: int) -> None:
        self._first, total = _layout(place.num_readers)
        self._next = 0  # number of the next message
        with contextlib.ExitStack() as undo:
            fd = os.open(place.memory, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._memory = mmap.mmap(fd, total)
            finally:
                os.close(fd)
            undo.callback(self._memory.close)
            # Each access is one load or store; struct's pack_into would write zeros first.
            self._positions = memoryview(self._memory)[: self._first].cast("Q")
            undo.callback(self._positions.release)
            self._bells = []
            for path in place.bells:
                self._bells.append(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
                undo.callback(os.close, self._bells[-1])
            self._undo = undo.pop_all()

    def _entry(self) -> int:
        """Offset of the next message's."""
        return self._first + self._next % ENTRIES * ENTRY_BYTES

    def close(self) -> None:
        """May be called twice."""
        self._undo.close()


class RingSender(_Side):
    """The writing side."""

    def __init__(self, place: RingPlace) -> None:
        """Raises OSError when the owner is gone."""
        super().__init__(place, os.O_WRONLY)
        self._num_readers = place.num_readers
        self._encoder = MessageEncoder()
        self._is_left = False

    def send(self, message: Wire) -> bool:
        """Puts a message into the ring; False: send it by socket, to all readers. Raises ProtocolError for one that may not
        travel."""
        if self._is_left:
            return False
        frames = self._encoder.encode(message)
        if self._next - self._slowest() >= ENTRIES - 1:  # the last free entry
            self._is_left = True
            self._put(ALL_BY_SOCKET, [])
            return False
        size = _ENTRY.size + 4 * len(frames) + sum(len(frame) for frame in frames)
        fits = size <= ENTRY_BYTES
        self._put(HERE if fits else BY_SOCKET, frames if fits else [])
        return fits

    def _slowest(self) -> int:
        """The number of messages that every reader has taken."""
        return min(self._positions[at * POSITION_STEP] for at in range(self._num_readers))

    def _put(self, kind: int, frames: list[Frame]) -> None:
        at, memory = self._entry(), self._memory
        _ENTRY.pack_into(memory, at, self._next, kind, len(frames))
        at += _ENTRY.size
        struct.pack_into(f"<{len(frames)}I", memory, at, *(len(frame) for frame in frames))
        at += 4 * len(frames)
        for frame in frames:
            memory[at : at + len(frame)] = frame
            at += len(frame)
        self._next += 1
        for bell in self._bells:
            os.write(bell, b"\1")


class RingReceiver(_Side):
    """The reading side, of messages of the union `accepts`. A Source for Poller."""

    def __init__(self, place: RingPlace, accepts: Any) -> None:
        """Raises OSError when the owner is gone."""
        super().__init__(place, os.O_RDWR)  # a writer that ends does not make the pipe readable
        self._position_at = place.reader * POSITION_STEP
        self._decoder = MessageDecoder(accepts)
        self._num_announced = 0
        self._awaits_socket = self._is_left = False
        self._by_socket: deque[Any] = deque()

    def add(self, message: Any) -> None:
        """A message of the writer's came by socket."""
        self._by_socket.append(message)

    def receive(self) -> Iterator[Any]:
        """Messages in the order in which they were sent, never blocking. Raises ProtocolError for one that is not as sent."""
        while True:
            if self._awaits_socket or self._is_left:
                if not self._by_socket:
                    return
                self._awaits_socket = False
                yield self._by_socket.popleft()
            elif (entry := self._take()) is None:
                return
            elif entry.kind == HERE:
                yield self._decoder.decode(entry.frames)
            else:
                self._awaits_socket, self._is_left = True, entry.kind == ALL_BY_SOCKET

    def _take(self) -> RingMessage | None:
        if not self._num_announced:
            with contextlib.suppress(BlockingIOError):
                self._num_announced = len(os.read(self._bells[0], ENTRIES))
            if not self._num_announced:
                return None
        at, memory = self._entry(), self._memory
        number, kind, num_frames = _ENTRY.unpack_from(memory, at)
        if number != self._next or kind not in (HERE, BY_SOCKET, ALL_BY_SOCKET) or num_frames > MAX_FRAMES:
            raise ProtocolError(f"entry {self._next % ENTRIES} of a ring holds message {number}, not {self._next}")
        at += _ENTRY.size
        sizes = struct.unpack_from(f"<{num_frames}I", memory, at)
        at += 4 * num_frames
        if _ENTRY.size + 4 * num_frames + sum(sizes) > ENTRY_BYTES:
            raise ProtocolError(f"message {number} of a ring has {sum(sizes)} bytes; an entry has {ENTRY_BYTES}")
        frames = []
        for size in sizes:
            frames.append(memory[at : at + size])
            at += size
        self._num_announced -= 1
        self._next += 1
        self._positions[self._position_at] = self._next
        return RingMessage(kind, frames)

    def poll_targets(self) -> tuple[int]:
        return (self._bells[0],)

    def tick(self, now: float) -> float:
        return NEVER

    def acknowledge(self) -> bool:
        return False

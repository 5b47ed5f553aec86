"""The shared-memory arena through which the CPU ranks of one engine run their collectives: its layout, size and lifetime.

The engine core creates it (`create_arena`) and hands its path to the workers, which map it
(csrc/cpu/collectives/collectives.cpp reads the same header). Torch-free. The arena carries numbers only: flags, tensor bytes,
pids, an abort word.

    | header page | stage 0: flags, 2 slots per tp rank | stage 1 ... | ring (stage 0 -> 1, tp rank 0) | ...
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import NamedTuple

from trireme.errors import ConfigError
from trireme.topology.mesh import Mesh

MAGIC = 0x414D5254  # "TRMA"
VERSION = 1
PAGE = 4096
FLAG_BYTES = 128  # one flag per pair of cache lines, to avoid false sharing
MAX_WORKERS = (PAGE - 256) // 4  # their pids are stored in the header page
ABORTED_BY_OWNER = 1
_HEADER = struct.Struct("<6I5Q")  # csrc/cpu/collectives/collectives.h: ArenaHeader
_ABORT_OFFSET = 8

_LARGEST_SLOT = 1 << 20  # longer messages are sent in pieces of this size, which stay in cache
_LARGEST_RING = 64 << 20


class ArenaLayout(NamedTuple):
    """Sizes and offsets in bytes. A slot holds one piece of one rank's contribution; a ring holds hidden states in transit."""

    slot_bytes: int
    ring_bytes: int
    group_bytes: int
    rings_offset: int
    total: int


def _pages(size: int) -> int:
    return (size + PAGE - 1) // PAGE * PAGE


def arena_layout(mesh: Mesh, max_tokens: int, hidden: int, vocab: int) -> ArenaLayout:
    """Layout for steps of at most `max_tokens` tokens; larger messages also work, in more pieces."""
    if mesh.num_workers > MAX_WORKERS:
        raise ConfigError(f"{mesh.num_workers} workers share one arena; at most {MAX_WORKERS} can")
    step_bytes = max_tokens * hidden * 4
    slot = _pages(min(max(step_bytes, vocab * 4), _LARGEST_SLOT))
    ring = _pages(min(max(2 * step_bytes, PAGE), _LARGEST_RING))
    group = _pages(mesh.tp * FLAG_BYTES) + (2 * mesh.tp * slot if mesh.tp > 1 else 0)
    rings_offset = PAGE + mesh.pp * group
    total = rings_offset + (mesh.pp - 1) * mesh.tp * (PAGE + ring)
    return ArenaLayout(slot, ring, group, rings_offset, total)


def arena_bytes(mesh: Mesh, max_tokens: int, hidden: int, vocab: int) -> int:
    """Size of the arena of one engine. Pages are allocated on first use."""
    return arena_layout(mesh, max_tokens, hidden, vocab).total


class Arena:
    """The owner's side. Workers open `path` while this process lives and keep their mapping afterwards."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._header = mmap.mmap(fd, PAGE)
        self.size = size
        self.path = f"/proc/{os.getpid()}/fd/{fd}"

    def abort(self) -> None:
        """Makes every running and future collective fail with CollectiveError. Called when a worker died; cannot be undone."""
        self._header[_ABORT_OFFSET : _ABORT_OFFSET + 4] = struct.pack("<I", ABORTED_BY_OWNER)

    def close(self) -> None:
        """Drops the owner's mapping and descriptor; may be called twice."""
        if self._fd >= 0:
            self._header.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def create_peers_arena(num_engines: int, max_tokens: int, hidden: int) -> Arena:
    """An arena for the engines of a deployment that run in lockstep: each is one rank."""
    return create_arena(Mesh(1, 1, num_engines), max_tokens, hidden, 0)


def create_arena(mesh: Mesh, max_tokens: int, hidden: int, vocab: int) -> Arena:
    """Creates the arena of one engine in memory. Raises ConfigError when the system provides none."""
    layout = arena_layout(mesh, max_tokens, hidden, vocab)
    try:
        fd = os.memfd_create("trireme-arena", os.MFD_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"no shared memory for {mesh.num_workers} workers: {error}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        os.ftruncate(fd, layout.total)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            0,
            mesh.tp,
            mesh.pp,
            0,
            layout.slot_bytes,
            layout.ring_bytes,
            layout.group_bytes,
            layout.rings_offset,
            layout.total,
        )
        os.pwrite(fd, header, 0)
        undo.pop_all()
    return Arena(fd, layout.total)

"""Faults in KV memory before requests need it: the first touch of a page waits for the kernel.

Called by workers.cpu.worker. The thread is in the idle scheduling class, so it runs only on idle cores, and keeps a reserve
beyond the highest block in use (blocks that never held anything are given out in ascending order); pages that it did not reach are
faulted in as blocks are first used.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence

from trireme.models.forward import HostKV

SHARE, MOST_BYTES = 8, 512 << 20  # the reserve: an eighth of the KV memory, at most this many bytes
_SLICE = 1 << 20  # bytes per call, of one layer's keys or values: small enough to end soon after `stop`
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class ResidentKv:
    """Faults in the blocks of all layers in block order, a slice of each layer at a time, up to the reserve."""

    def __init__(self, kv: Sequence[HostKV], *, yields: bool = True) -> None:
        """The first axis of every array is the block. `yields`: run only on idle cores, so that on a busy machine it may never
        finish."""
        self._yields = yields
        self._arrays = [array for layer in kv for array in (layer.k, layer.v)]
        self.num_blocks = len(self._arrays[0]) if self._arrays else 0
        block_bytes = sum(array.nbytes for array in self._arrays) // max(1, self.num_blocks)
        self.reserve = min(self.num_blocks // SHARE, MOST_BYTES // max(1, block_bytes))  # blocks
        self.num_bytes = 0  # made resident so far
        self._turn = threading.Condition()
        self._wanted = self.reserve  # blocks
        self._done = 0  # blocks
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)

    def start(self) -> None:
        """Starts the background thread."""
        self._thread.start()

    def follow(self, num_used: int) -> None:
        """The blocks before `num_used` are in use or were; called at every step, so it is cheap. The reserve is refilled once half
        of it is used."""
        if num_used + self.reserve // 2 >= self._wanted and self._wanted < self.num_blocks:
            with self._turn:
                self._wanted = min(num_used + self.reserve, self.num_blocks)
                self._turn.notify()

    def stop(self) -> None:
        """Returns once the thread touches no more memory."""
        with self._turn:
            self._is_stopped = True
            self._turn.notify()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Whether the wanted pages are resident, or never will be."""
        with self._turn:
            return self._turn.wait_for(lambda: self._done >= self._wanted or not self._thread.is_alive(), timeout_s)

    def _run(self) -> None:
        if self._yields:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread alone
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while (stop := self._next_stop()) is not None:
            for array in self._arrays:
                start, size = _pages(array.ctypes.data, array.nbytes // self.num_blocks, self._done, stop)
                if self._is_stopped:
                    return
                if madvise(start, size, _POPULATE_WRITE) != 0:
                    return  # an older kernel, or no memory left: pages are faulted in as they are used
                self.num_bytes += size
            with self._turn:
                self._done = stop
                self._turn.notify_all()

    def _next_stop(self) -> int | None:
        """The block before which the next slices end; waits for work. None: stopped."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_stopped or self._done < self._wanted)
            if self._is_stopped:
                return None
            largest = max(array.nbytes for array in self._arrays) // self.num_blocks
            return min(self._wanted, self._done + max(1, _SLICE // largest))


def _pages(address: int, block: int, start: int, stop: int) -> tuple[int, int]:
    """Address and bytes of the pages that hold the blocks start..stop-1 of `block` bytes each, the first of them at `address`."""
    page = os.sysconf("SC_PAGE_SIZE")
    first = (address + start * block) // page * page
    return first, -(-(address + stop * block) // page) * page - first

"""Makes the first KV memory resident before requests need it: a page that is touched for the first time waits for the system.

Called by workers.worker. The thread is in the idle class, so it works only while nobody computes; what it had no time for is taken
from the system as blocks are first used, as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Sequence

from models.forward import HostKV

SHARE, MOST_BYTES = 8, 512 << 20  # an eighth of the KV memory, and at most so much
_SLICE = 1 << 20  # bytes per call, of one layer's keys or values: few enough to end soon after `stop`
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, since Linux 5.14


class ResidentKv:
    """Walks over the first blocks of all layers, which are used first, a slice of each layer in turn."""

    def __init__(self, kv: Sequence[HostKV], *, yields: bool = True) -> None:
        """`yields`: only while nobody else computes, so that on a busy machine it may never come to its end."""
        self._yields = yields
        self._arrays = [array for layer in kv for array in (layer.k, layer.v)]
        total = sum(array.nbytes for array in self._arrays)
        self.num_bytes = min(total // SHARE, MOST_BYTES)
        self.num_done = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)

    def start(self) -> None:
        """Begins in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Returns when no memory is touched any more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has come to its end."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._yields:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread alone
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        page = os.sysconf("SC_PAGE_SIZE")
        each = self.num_bytes // max(1, len(self._arrays)) // page * page
        for offset in range(0, each, _SLICE):
            for array in self._arrays:
                size = min(_SLICE, each - offset)
                if self._stopped.is_set():
                    return
                start = array.ctypes.data // page * page + offset
                if madvise(start, size, _POPULATE_WRITE) != 0:
                    return  # an older system, or no memory left: pages come as they are used
                self.num_done += size

"""What the front ends of one deployment keep in common: files of fixed records in the private run directory.

They outlive every front end and end with the supervisor. Nobody waits for anybody here: what a lock guards is done without it when
it is not to be had within LOCK_S (its holder may have been stopped), which costs exactness and nothing else; so does a full disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_S = 0.005
RETRY_S = 0.0002


class SharedFile:
    """One file, opened by each process once: a second handle of the same process would end its locks."""

    def __init__(self, path: str | Path) -> None:
        """Makes the file if nobody has. Raises OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, size: int, offset: int = 0) -> bytes:
        """Exactly `size` bytes; zeros where nothing was ever written, or nothing can be read."""
        try:
            found = os.pread(self._fd, size, offset)
        except OSError:
            found = b""
        return found.ljust(size, b"\0")

    def write(self, data: bytes, offset: int = 0) -> bool:
        """False when it could not be written."""
        try:
            return os.pwrite(self._fd, data, offset) == len(data)
        except OSError:
            return False

    @contextlib.contextmanager
    def locked(self, size: int, offset: int = 0) -> Iterator[bool]:
        """Holds a stretch of the file against the other processes. Gives False when it goes on without: see above."""
        has_lock = self._lock(size, offset)
        try:
            yield has_lock
        finally:
            if has_lock:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, size, offset)

    def _lock(self, size: int, offset: int) -> bool:
        until = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, size, offset)
                return True
            except OSError:
                if time.monotonic() >= until:
                    return False
            time.sleep(RETRY_S)

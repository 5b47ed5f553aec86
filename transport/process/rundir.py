"""The private directory where one deployment keeps its sockets, removed by whoever is left when the deployment ends.

Made by the supervisor (or LLM). Its lock file, held open by the maker, tells a directory in use from one left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK_NAME = "owner.lock"
PREFIX = "trireme-"


class RunDir:
    """A directory of mode 0700 under the system's temporary directory, with a short name (unix socket paths are short)."""

    def __init__(self) -> None:
        sweep_run_dirs()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        unlocked = Path(self.path, "unlocked")
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path, LOCK_NAME))  # a sweep must never see the lock file before it is locked

    def remove(self) -> None:
        """Deletes the directory; once is enough."""
        if self._lock >= 0:
            remove_run_dir(self.path)
            os.close(self._lock)
            self._lock = -1


def remove_run_dir(path: str) -> None:
    """Deletes a directory that RunDir made, and nothing else. Safe to call from several processes at once."""
    if Path(path, LOCK_NAME).exists():
        shutil.rmtree(path, ignore_errors=True)


def sweep_run_dirs() -> None:
    """Deletes directories of this user whose maker is no longer alive."""
    for lock_path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_NAME}"):
        try:
            if lock_path.stat().st_uid != os.getuid():
                continue
            lock = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)

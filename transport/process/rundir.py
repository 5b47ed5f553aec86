"""The private directory of a deployment's sockets, removed when the deployment ends, however it ends.

Created by the supervisor (or LLM), which removes it; if that is killed, its caretaker does, and if that is killed too, the next
creator. Its lock file, held open by the creator, tells a directory in use from an abandoned one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LOCK_NAME = "owner.lock"
PREFIX = "trireme-"
CARETAKER = str(Path(__file__).with_name("caretaker.py"))
CARETAKER_ENDS_S = 3.0


class RunDir:
    """A directory of mode 0700 under the system's temporary directory, with a short name (unix socket paths are short)."""

    def __init__(self) -> None:
        sweep_run_dirs()
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        unlocked = Path(self.path, "unlocked")
        self._lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(Path(self.path, LOCK_NAME))  # a sweep must never see the lock file before it is locked
        self._caretaker = subprocess.Popen(
            [sys.executable, "-I", "-S", CARETAKER, self.path, LOCK_NAME],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C reaches the supervisor only
        )

    def remove(self) -> None:
        """Deletes the directory; idempotent."""
        if self._lock >= 0:
            remove_run_dir(self.path)
            os.close(self._lock)
            self._lock = -1
            self._caretaker.kill()
            assert self._caretaker.stdin is not None
            self._caretaker.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._caretaker.wait(CARETAKER_ENDS_S)


def remove_run_dir(path: str) -> None:
    """Deletes a directory that RunDir created, and nothing else. Safe to call from several processes at once."""
    if Path(path, LOCK_NAME).exists():
        shutil.rmtree(path, ignore_errors=True)


def sweep_run_dirs() -> None:
    """Deletes directories of this user whose creator is no longer alive."""
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

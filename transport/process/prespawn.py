"""Starts child processes before it is known what they will be told: each imports its module, then waits for its Boot.

Imports nothing but the standard library, so that a launcher can call it first of all. transport/process/boot.py does the rest.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

CHILD_SCRIPT = str(Path(__file__).with_name("child.py"))
DISCARD_S = 3.0  # the system may keep a process for longer


class Prespawned(NamedTuple):
    """A child without a Boot. `channel` is our end of a SOCK_SEQPACKET pair whose other end is the child's stdin."""

    name: str
    process: subprocess.Popen[bytes]
    channel: socket.socket
    born: float = 0.0  # time.monotonic() of its order

    def discard(self) -> None:
        """Ends a child that is not needed after all."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DISCARD_S)
        self.channel.close()


def prespawn(module: str, name: str, *, also: tuple[str, ...] = (), output: int = 2) -> Prespawned:
    """Starts `python transport/process/child.py module name`, which imports `also` too while it waits. What the child prints
    goes to the descriptor `output`, by default our stderr. Raises OSError.

    Call from the main thread where possible: only then the kernel itself ties the child's life to ours (it watches the
    thread that started the child); else the child's own watcher does. Until the child ignores SIGINT and SIGTERM, as all do,
    they are blocked in it.
    """
    born = time.monotonic()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        former = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # a child inherits this
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", CHILD_SCRIPT, module, name, str(int(_death_signal())), *also],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                process_group=0,  # the terminal's Ctrl-C reaches the supervisor only
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return Prespawned(name, process, ours, born)


def _death_signal() -> int:
    """Children are killed by the kernel itself: their own watcher is a thread, which cannot run while another one has the
    interpreter."""
    return signal.SIGKILL if threading.current_thread() is threading.main_thread() else 0

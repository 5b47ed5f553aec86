"""Starts child processes before their Boot is known: each imports its module, then waits.

Imports only the standard library, so that a launcher can call it first of all. transport/process/boot.py does the rest.
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
DISCARD_S = 3.0  # the kernel may keep the process for longer


class Prespawned(NamedTuple):
    """A child without a Boot. `channel` is our end of a SOCK_SEQPACKET pair whose other end is the child's stdin."""

    name: str
    process: subprocess.Popen[bytes]
    channel: socket.socket
    born: float = 0.0  # time.monotonic() when it was ordered

    def discard(self) -> None:
        """Ends a child that turned out not to be needed."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(DISCARD_S)
        self.channel.close()


def prespawn(module: str, name: str, *, also: tuple[str, ...] = (), output: int = 2) -> Prespawned:
    """Starts `python transport/process/child.py module name`, which also imports `also` while it waits. The child's output goes
    to the descriptor `output`, by default our stderr. Raises OSError.

    Call from the main thread where possible: only then does the kernel itself kill the child with its parent (it watches the
    thread that started the child); otherwise the child's own watcher does. SIGINT and SIGTERM are blocked in the child until it
    ignores them, as all children do.
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
                process_group=0,  # a terminal's Ctrl-C reaches the supervisor only
            )
        except OSError:
            ours.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return Prespawned(name, process, ours, born)


def _death_signal() -> int:
    """The signal for PR_SET_PDEATHSIG: the kernel kills the child, whose own watcher is a thread and cannot run while another one
    holds the GIL."""
    return signal.SIGKILL if threading.current_thread() is threading.main_thread() else 0

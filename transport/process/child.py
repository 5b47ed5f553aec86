"""Entry script of every child process: `python -P transport/process/child.py MODULE NAME DEATH_SIGNAL [MODULE...]`, with the boot
channel as stdin.

Started by prespawn only. Ties this process to its parent before anything slow is imported.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main() -> None:
    """Sets up signals, the parent death signal and sys.path, then runs the module named in argv through boot.run_child."""
    began = time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # the parent decides; it has blocked them so far (transport/process/prespawn.py)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
    gc.disable()  # until BootChannel.ready: most objects made during a start live on
    os.putenv("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, unused here, take longer to start than numpy itself
    module, name, death_signal, *also = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if int(death_signal):
        libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    sys.path.insert(0, str(Path(__file__).absolute().parents[3]))  # not resolved: the package is a link in a checkout

    from trireme.transport.process.boot import run_child

    run_child(module, name, also, began)


if __name__ == "__main__":
    main()

"""Removes a deployment's private directory if its creator died without doing so.

`python -I -S transport/process/caretaker.py DIRECTORY LOCK_NAME`: stdin is a pipe whose other end only the creator holds. Started
by RunDir: the kernel can then kill the children of a dead creator at once, since none of them has to clean up.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LOOK_S, GIVE_UP_S = 0.05, 5.0  # retried, since dying processes may still write there


def main() -> None:
    """Waits for the end of stdin, then deletes the directory, again while its lock file exists, for at most GIVE_UP_S."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    path, lock_name = sys.argv[1:]
    while os.read(0, 1):
        pass
    import shutil

    until = time.monotonic() + GIVE_UP_S
    while os.path.exists(os.path.join(path, lock_name)) and time.monotonic() < until:
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(LOOK_S)
    shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()

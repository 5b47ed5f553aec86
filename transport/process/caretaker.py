"""Removes a deployment's private directory once its maker has died without doing so.

`python -I -S transport/process/caretaker.py DIRECTORY LOCK_NAME`: stdin is a pipe whose other end only the maker holds.
Started by RunDir, so that the kernel can kill the children of a dead maker at once, whatever they are doing, with nothing left
for them to do.
"""

from __future__ import annotations

import os
import signal
import sys
import time

LOOK_S, GIVE_UP_S = 0.05, 5.0  # what the dying still write there is removed with it


def main() -> None:
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

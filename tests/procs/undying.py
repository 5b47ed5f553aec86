"""A real process that can be killed and does not go, as one that waits for a broken device: the kernel keeps it, with all it holds.

A tracer has asked to be told of its exit before that happens, and does not let it go on. SIGKILL has no power over that stop.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.deployment import is_alive, wait_for

_TRACER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
SEIZE, TRACE_EXIT = 0x4206, 0x40
for thread in os.listdir(f"/proc/{sys.argv[1]}/task"):
    if libc.ptrace(SEIZE, int(thread), None, ctypes.c_void_p(TRACE_EXIT)):
        sys.exit(os.strerror(ctypes.get_errno()))
print("traced", flush=True)
while True:
    signal.pause()
"""


@contextlib.contextmanager
def undying(pid: int) -> Iterator[None]:
    """Until it is left, the process does not go. Skips the test where nobody may trace."""
    command = [sys.executable, "-c", _TRACER, str(pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout is not None
        try:
            if tracer.stdout.readline() != "traced\n":
                assert tracer.stderr is not None
                pytest.skip(f"processes cannot be traced here: {tracer.stderr.read()}")
            yield
            assert Path(f"/proc/{pid}/stat").exists(), "it has gone all the same"
        finally:
            tracer.kill()
    wait_for(
        lambda: not is_alive(pid) and num_threads(pid) <= 1, 5.0, "it goes, with all of its threads, when it is let go"
    )


def num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0

"""The three standard streams of a command, in whatever state they were handed over. Standard library only.

Called by launch/cli.py before anything else can open a file, and when output fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def prepare_streams() -> None:
    """Opens those that are closed on the null device (else the next file or socket would become one of them, and get what is
    printed), and lets no character fail that the terminal does not have."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def utf8_only() -> Iterator[None]:
    """Around a read of standard input. Raises RequestError."""
    try:
        yield
    except UnicodeError as error:
        from trireme.errors import RequestError

        raise RequestError(f"standard input is not UTF-8: {getattr(error, 'reason', error)}") from None


def give_up(stream_number: int) -> None:
    """What is still to be written there, now or by the interpreter at its end, goes nowhere."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, stream_number)
        os.close(null)

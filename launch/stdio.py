"""The three standard streams of a command, whatever state they were inherited in. Standard library only.

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
    """Opens closed ones on the null device (else the next file or socket would take their number, and receive what is printed),
    and escapes characters that the terminal cannot encode."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor, which is this one
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


@contextlib.contextmanager
def utf8_only() -> Iterator[None]:
    """A context for reading standard input. Raises RequestError for bytes that are not UTF-8."""
    try:
        yield
    except UnicodeError as error:
        from trireme.errors import RequestError

        raise RequestError(f"standard input is not UTF-8: {getattr(error, 'reason', error)}") from None


def give_up(stream_number: int) -> None:
    """Redirects the stream to the null device: what is still to be written, now or at interpreter exit, is discarded."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, stream_number)
        os.close(null)

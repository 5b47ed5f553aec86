"""Removes API keys from the command line that other users of the machine can read (`ps`, /proc/PID/cmdline).

Called first of all by launch/cli.py. Keys are still exposed until then, and in the shell's history; --api-key-file avoids both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

FLAGS = (b"--api-key", b"--admin-key")
_FIRST_FIELD = 3  # of /proc/self/stat, after the name
_ARG_START, _ARG_END = 48, 49  # see proc(5)


def hide_keys() -> None:
    """Overwrites the keys in the process's argument memory; sys.argv keeps them. Does nothing where its address is unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = (int(fields[i - _FIRST_FIELD]) for i in (_ARG_START, _ARG_END))
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        for at, size in key_places(ctypes.string_at(start, end - start)):
            ctypes.memset(start + at, ord("*"), size)


def key_places(line: bytes) -> Iterator[tuple[int, int]]:
    """Offset and length of each key in a command line whose words end in zero bytes."""
    at, is_key = 0, False
    for word in line.split(b"\0"):
        flag, equals, _ = word.partition(b"=")
        if is_key and word:
            yield at, len(word)
        elif equals and flag in FLAGS:
            yield at + len(flag) + 1, len(word) - len(flag) - 1
        is_key = word in FLAGS and not is_key
        at += len(word) + 1

"""Sanitizes untrusted text (from a model, a server, a file) for a terminal: removes control characters.

Used by every command that shows such text. What goes into a file or a pipe is unchanged.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# C0 but for tab and newline, DEL, C1: escape sequences begin with one of these
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab. Splitting a text does not change the result."""
    return _CONTROLS.sub("", text)


def show(text: str, *, end: str = "\n", to: TextIO | None = None) -> None:
    """Writes text to stdout, or `to`, at once; on a terminal, only its printable characters."""
    out = to or sys.stdout
    print(printable(text) if out.isatty() else text, end=end, file=out, flush=True)

"""Text of others (a model, a server, a file) on a terminal: without the characters that a terminal would obey.

Used by every command that shows such text. What goes into a file or a pipe stays as it is.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# C0 but for tab and newline, DEL, C1: escape sequences begin with one of these
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters other than newline and tab. Any split of a text gives the same."""
    return _CONTROLS.sub("", text)


def show(text: str, *, end: str = "\n", to: TextIO | None = None) -> None:
    """Writes text to stdout, or `to`, at once; if that is a terminal, only what is printable of it."""
    out = to or sys.stdout
    print(printable(text) if out.isatty() else text, end=end, file=out, flush=True)

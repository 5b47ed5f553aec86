"""`trireme version`: prints it at once, so it imports nothing."""

from __future__ import annotations

from trireme import __version__
from trireme.launch.options import Invocation


def run(invocation: Invocation) -> int:
    """Prints `trireme X.Y.Z`, or JSON."""
    print(f'{{"version": "{__version__}"}}' if invocation.options["json"] else f"trireme {__version__}")
    return 0

"""Progress of a start on the terminal, for commands that may also run without one. rich is imported by the first bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trireme.launch.api.startup import line_of
from trireme.transport.wire.messages import Progress


class ProgressView:
    """Shown if `wanted`; None: if stderr is a terminal. May be called from any thread."""

    def __init__(self, wanted: bool | None = None) -> None:
        self._wanted = sys.stderr.isatty() if wanted is None else wanted
        self._console: Any = None

    def on_progress(self, report: Progress) -> None:
        """Shows one Progress, if wanted."""
        if not self._wanted:
            return
        if self._console is None:
            from trireme.launch.console import Console

            self._console = Console()
        self._console.progress(report.source, report.phase, report.done, report.total)

    def started(self, parts: Mapping[str, float]) -> None:
        """Prints where the time of a start went; call it after `close`."""
        if self._wanted:
            from trireme.launch.console import Console

            Console().say(f"ready in {sum(parts.values()):.1f} s  {line_of(parts)}")

    def close(self) -> None:
        """Ends the bars and leaves them on screen."""
        if self._console is not None:
            self._console.close()
            self._console = None

"""Terminal output while Trireme starts and runs: progress bars, the ready panel, tables. The only user of rich.

Written to stderr unless told otherwise: stdout is for data. On a terminal lines are animated; elsewhere each event is one plain
line. NO_COLOR is honoured (by rich).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from trireme.config import Decision
from trireme.launch.terminal import printable
from trireme.sizes import MIB, format_bytes

PLAIN_EVERY_S = 5.0
GAP = 2  # characters between columns of a table


class _Amount(ProgressColumn):
    """`3/30`, or bytes for large totals."""

    def render(self, task: Task) -> Text:
        return Text(_amount(task.completed, task.total or 0), style="progress.download")


def _text(text: str, style: str = "") -> Text:
    """Text without markup: names, templates and errors may come from untrusted files and servers."""
    return Text(printable(text), style=style)


def _amount(done: float, total: float) -> str:
    if total >= MIB:
        return f"{format_bytes(done)} of {format_bytes(total)}"
    return f"{done:.0f}/{total:.0f}" if total else ""


class _Output(RichConsole):
    """rich exits with status 1 on a broken pipe; here the caller decides."""

    def on_broken_pipe(self) -> None:
        raise  # called inside rich's exception handler


class _Status(RichConsole):
    """Status output. A closed pipe or a full disk does not end the work."""

    def print(self, *objects: Any, **options: Any) -> None:
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True


class Console:
    """One per command. `progress` may be called from any thread; `close` ends the animation and leaves the last state."""

    def __init__(self, stream: TextIO | None = None) -> None:
        out = stream or sys.stderr
        self._rich = (_Output if out is sys.stdout else _Status)(
            file=out, highlight=False, soft_wrap=True, width=None if out.isatty() else 200
        )
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._begun: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], float] = {}

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def say(self, text: str, *, style: str = "") -> None:
        """One line, above the bars if there are any."""
        self._rich.print(_text(text, style))

    def title(self, left: str, right: str = "") -> None:
        if self.is_terminal and right:
            gap = max(self._rich.width - len(left) - len(right), 2)
            self._rich.print(_text(left, "bold"), _text(" " * (gap - 2) + right, "dim"))
        else:
            self.say(f"{left}  {right}".rstrip(), style="bold")

    # ------------------------------------------------------------ progress

    def progress(self, source: str, phase: str, done: int, total: int) -> None:
        """Progress of one phase of one part. A phase is over when done == total."""
        key = (source, phase)
        now = time.monotonic()
        self._begun.setdefault(key, now)
        if self.is_terminal:
            self._move_bar(key, done, total)
        elif done >= total and self._told.get(key) != -1.0:
            self._told[key] = -1.0
            self.say(f"  {source:<12} {phase:<14} {_amount(total, total)}  {now - self._begun[key]:.1f} s")
        elif done < total and now - self._told.setdefault(key, now) >= PLAIN_EVERY_S:
            self._told[key] = now
            self.say(f"  {source:<12} {phase:<14} {_amount(done, total)} ...")

    def _move_bar(self, key: tuple[str, str], done: int, total: int) -> None:
        if self._bars is None:
            self._bars = Progress(
                TextColumn("  {task.fields[source]:<12} {task.description:<14}"),
                BarColumn(30),
                _Amount(),
                TimeElapsedColumn(),
                console=self._rich,
                transient=False,
            )
            self._bars.start()
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(key[1], total=total or None, source=key[0])
        self._bars.update(self._tasks[key], completed=done, total=total or None)

    def close(self) -> None:
        """Ends the bars and leaves them on screen."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            self._tasks.clear()

    # ------------------------------------------------------------ output of others

    @contextmanager
    def around_stderr(self, pipe: tuple[int, int] | None = None) -> Iterator[None]:
        """Redirects stderr of this process and its children above the bars, line by line.

        For terminals only; elsewhere nothing changes, unless there is already a `pipe` (read end, write end), to which children
        write. Those must have ended before the context is left.
        """
        if not self.is_terminal and pipe is None:
            yield
            return
        sys.stderr.flush()
        terminal = os.dup(2)
        reading, writing = pipe or os.pipe()
        os.dup2(writing, 2)
        os.close(writing)
        former, self._rich.file = self._rich.file, os.fdopen(terminal, "w", buffering=1)
        lines = threading.Thread(target=self._pass_on, args=(reading,), name="stderr", daemon=True)
        lines.start()
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            lines.join(1.0)
            self.close()
            self._rich.file.close()
            self._rich.file = former

    def _pass_on(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                self._rich.print(_text(line.rstrip("\n")))

    # ------------------------------------------------------------ panels and tables

    def decisions(self, decisions: Sequence[Decision]) -> None:
        """Decisions and reasons, one per line."""
        grid = Table.grid(padding=(0, 2))
        for decision in decisions:
            grid.add_row(_text("  " + decision.what, "cyan"), _text(decision.value), _text(decision.because, "dim"))
        self._rich.print(grid, soft_wrap=False)

    def ready(self, seconds: float, address: str, curl: str, also: str, parts: str = "") -> None:
        """The panel that ends a successful start; `parts` is the breakdown of the time."""
        self.close()
        line = Text(f"ready in {seconds:.1f} s", style="bold green").append("   ").append(address, style="bold")
        self._rich.print()
        self._rich.print(line)
        if parts:
            self._rich.print(Text("  " + parts, style="dim"))
        self._rich.print(Text("  " + curl.replace("\n", "\n  ")))
        self._rich.print(Text("  " + also, style="dim"))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Right-aligned figures under headings; the first column is text. A table wider than the output is turned: a line for
        each heading, and as many rows side by side as fit."""
        if _width((columns, *rows)) <= self._rich.width or not rows:
            self._print_table(columns, rows)
            return
        start = 0
        while start < len(rows):
            end = start + 1
            while end < len(rows) and _width(_turned(columns, rows[start : end + 1])) <= self._rich.width:
                end += 1
            head, *lines = _turned(columns, rows[start:end])
            self._print_table(head, lines)
            start = end

    def _print_table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(box=None, pad_edge=False, padding=(0, GAP // 2), header_style="bold")
        for i, column in enumerate(columns):
            table.add_column(_text(column), justify="left" if i == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(_text, row))
        self._rich.print(table, soft_wrap=False)


def _width(lines: Sequence[Sequence[str]]) -> int:
    """Width of a table, headings included, in characters."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return sum(widths) + GAP * (len(widths) - 1)


def _turned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The table with rows as columns; its first line is the headings."""
    return list(zip(columns, *rows, strict=True))

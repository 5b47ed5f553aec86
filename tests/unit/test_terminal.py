"""What a model writes reaches a terminal without escape sequences, and a pipe as it is; real pseudo-terminals and a real engine."""

from __future__ import annotations

import os
import pty
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.tiny import make_stub
from trireme.launch.cli import main, print_error
from trireme.launch.console import Console
from trireme.launch.terminal import printable

EVIL = "\x1b]0;owned\x07\x1b[31mred\x1b[0m\r\x08\x7f\x9b2J tab\tline\n\u00e9"
SHOWN = "]0;owned[31mred[0m2J tab\tline\n\u00e9"


@pytest.fixture
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal to write to, and the descriptor of its other side."""
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w", newline="") as out:
        yield out, reading
    os.close(reading)


def seen(reading: int) -> str:
    found = b""
    while select.select([reading], [], [], 0.1)[0]:
        found += os.read(reading, 65536)
    return found.decode().replace("\r\n", "\n")  # the line discipline's carriage returns


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_terminal_gets_no_escape_sequences(
    tmp_path: Path,
    terminal: tuple[TextIO, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    out, reading = terminal
    model = make_stub(tmp_path / "m", scripts=[[EVIL]])
    words = [command, str(model), *(["once"] if command == "complete" else []), "--max-tokens", "80"]
    said = tmp_path / "said"
    said.write_text("hi\n")
    with monkeypatch.context() as patched, said.open() as lines:
        patched.setattr(sys, "stdout", out)
        patched.setattr(sys, "stdin", lines)
        assert main(words) == 0
    assert seen(reading) == SHOWN + "\n"
    with said.open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        assert main(words) == 0
    assert capsys.readouterr().out == EVIL + "\n"


def test_neither_do_errors_and_tables(terminal: tuple[TextIO, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's error text, a model's name."""
    out, reading = terminal
    monkeypatch.setattr(sys, "stderr", out)
    print_error(f"the server answered {EVIL}", "try\x1b[2J this")
    assert seen(reading) == f"error: the server answered {SHOWN}\n  try   try[2J this\n"
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(out)
    console.say("name \x1b[2J")
    console.table(["a"], [["\x1b]0;x\x07cell"]])
    shown = seen(reading)
    assert "name [2J" in shown
    assert "]0;xcell" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b]" not in shown


@given(st.text(), st.integers(0, 20))
def test_any_split_shows_the_same(text: str, cut: int) -> None:
    assert printable(text[:cut]) + printable(text[cut:]) == printable(text)
    assert not any(char < " " and char not in "\n\t" or "\x7f" <= char <= "\x9f" for char in printable(text))
    assert printable(text) == "".join(char for char in text if printable(char))

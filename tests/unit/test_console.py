"""The console without a terminal: whole lines, nothing painted; and the events of a start as a person reads them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.config import Decision
from trireme.launch import console as console_module
from trireme.launch.api.client import read_pass
from trireme.launch.api.view import ProgressView
from trireme.launch.cli import print_error
from trireme.launch.commands.serve import ServeView, curl_line, merge_decisions, print_failed, url_of
from trireme.launch.console import Console
from trireme.launch.processes.connection_file import PASS_NAME
from trireme.launch.processes.events import AllReady, Died, Restarted, Stopped, Stopping
from trireme.machine.device import DeviceFacts
from trireme.resolve import ModelFacts, Prepared
from trireme.settings import load
from trireme.transport.wire.messages import Boot, Failed, Progress, Ready

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def out():
    return io.StringIO()


@pytest.fixture
def console(out):
    return Console(out)


def test_a_phase_is_one_line_when_it_is_over(console, out):
    for done in range(31):
        console.progress("engine-0", "weights", done << 20, 30 << 20)
    console.progress("engine-0", "weights", 30 << 20, 30 << 20)
    (line,) = out.getvalue().splitlines()
    assert "engine-0" in line
    assert "30 MiB of 30 MiB" in line


def test_a_long_phase_tells_how_far_it_is(console, out, monkeypatch):
    monkeypatch.setattr(console_module, "PLAIN_EVERY_S", 0.0)
    for done in range(4):
        console.progress("engine-0", "layers", done, 3)
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["0/3", "1/3", "2/3", "3/3"]


def test_tables_line_up_and_hold_no_escape_codes(console, out):
    console.table(["", "tok/s"], [["c=1", "9.5"], ["c=32", "1200"]])
    console.say("red", style="red")
    text = out.getvalue()
    assert "\x1b" not in text
    assert len({len(line.rstrip()) for line in text.splitlines()[:3]}) == 1


def test_a_table_that_is_too_wide_is_turned_and_loses_no_figure(console, out):
    columns = ["", *(f"figure_{i}" for i in range(30))]
    rows = [[f"row {r}", *(str(1000 * r + i) for i in range(30))] for r in range(40)]
    console.table(columns, rows)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 200
    heads = [line.split() for line in lines if "row" in line]
    assert len(heads) == 2  # (40 rows do not fit side by side)
    assert [word for head in heads for word in head if word != "row"] == [str(r) for r in range(40)]
    for i in range(30):
        parts = [line.split()[1:] for line in lines if line.split()[0] == f"figure_{i}"]
        assert [int(figure) for part in parts for figure in part] == [1000 * r + i for r in range(40)]


def test_a_table_without_rows_is_its_headings(console, out):
    console.table(["", "x" * 150, "y" * 150], [])
    assert "x" in out.getvalue()


def test_nothing_is_shown_when_nobody_wants_it(capsys):
    view = ProgressView(False)
    view.on_progress(Progress("a", "b", 1, 1))
    view.close()
    assert capsys.readouterr() == ("", "")
    view = ProgressView(True)
    view.on_progress(Progress("a", "b", 1, 1))
    view.close()
    assert "a" in capsys.readouterr().err


def test_an_error_is_its_message_then_its_cures(capsys):
    print_error("no room", "--max-len 8\n--tp 2")
    assert capsys.readouterr().err == "error: no room\n  try   --max-len 8\n  or    --tp 2\n"


def view_of(console, **flags):
    from tests.unit.test_resolve import SMOL

    config = load({"served_name": "it's a model", **flags}, environ={}).config
    device = DeviceFacts(cores=2, memory_free=1, memory_total=1, cpu="Oar 3")
    return ServeView(
        console, Prepared(config, [Decision("tp", "2", "asked")], ModelFacts(SMOL, "smol", 1), device), 0.0
    )


def test_the_ready_panel_has_address_curl_and_reasons(console, out, tmp_path):
    view = view_of(console)
    view.make_boot = lambda: Boot("front", "client", 0, b"config", b"hash", str(tmp_path))
    view.show_title()
    parts = {f"engine-{i}": Ready(f"engine-{i}", decisions=[("kv", "100 blocks", "memory")]) for i in range(2)}
    view.on_event(AllReady(("127.0.0.1", 8123), parts, 1.0))
    text = out.getvalue()
    assert "http://127.0.0.1:8123" in text
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in text
    assert text.count("100 blocks") == 1
    assert "asked" in text
    assert "Oar 3" in text
    assert f"trireme.Client('{tmp_path}')" in text
    left = read_pass(tmp_path)
    assert left.config == b"config"
    assert left.name.startswith("client-")
    assert (tmp_path / PASS_NAME).stat().st_mode & 0o777 == 0o600


def test_the_curl_line_survives_a_shell():
    config = load({"served_name": "it's a model", "api_key": "k"}, environ={}).config
    words = shlex.split(curl_line("http://x:1", config).replace("\\\n", ""))
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"
    assert "Authorization: Bearer $TRIREME_API_KEY" in words


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://127.0.0.1:1"),
        ("::1", "http://[::1]:1"),
        ("10.0.0.1", "http://10.0.0.1:1"),
        ("fe80::1%eth0", "http://[fe80::1%25eth0]:1"),
    ],
)
def test_an_address_can_be_used_as_it_is(host, url):
    assert url_of(host, 1) == url


def test_an_open_server_is_warned_about(console, out):
    view_of(console, host="0.0.0.0").on_event(AllReady(("0.0.0.0", 1), {}, 1.0))
    assert "--api-key" in out.getvalue()


def test_the_life_of_parts_is_told_in_sentences(console, out, capsys):
    view = view_of(console)
    view.on_event(Died("engine-0", "out of memory", 2.0, 1))
    view.on_event(Restarted("engine-0", 1))
    view.on_event(Died("engine-0", "again", None, 6))
    view.on_event(Stopping("SIGTERM", 60.0))
    told = out.getvalue().splitlines()
    assert told[0] == "engine-0 died: out of memory; it starts again in 2 s"
    assert told[1] == "engine-0 is back, in its life number 2"
    assert told[2].endswith("it stays down")
    assert "60 s" in told[3]
    view.on_event(Stopped(0, None))
    print_failed(Failed("engine-0", "no such tensor", "another file", exit_code=3))
    assert capsys.readouterr().err == "error: engine-0: no such tensor\n  try   another file\n"


def test_a_fault_of_ours_shows_the_childs_own_traceback_before_the_error(capsys):
    print_failed(Failed("engine-0", "KeyError: 3", "", "Traceback: in child"))
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "Traceback: in child"
    assert told[-1] == "error: engine-0: KeyError: 3"


def test_equal_decisions_are_said_once_in_order():
    parts = {
        "a": Ready("a", decisions=[("x", "1", "p"), ("y", "2", "q")]),
        "b": Ready("b", decisions=[("x", "1", "p")]),
    }
    merged = merge_decisions([Decision("tp", "2", "r")], parts)
    assert [d.what for d in merged] == ["tp", "x", "y"]


ON_A_TERMINAL = """
import subprocess, sys, time
from trireme.launch.console import Console
console = Console()
assert console.is_terminal
with console.around_stderr():
    for done in range(4):
        console.progress("engine-0", "weights", done, 3)
        subprocess.run(["sh", "-c", "echo a line of a child >&2"], check=True)
        print("a line of our own", file=sys.stderr, flush=True)
        time.sleep(0.15)
    console.close()
print("after", file=sys.stderr)
"""


def test_on_a_terminal_lines_of_children_come_out_whole_above_the_bars():
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "COLUMNS": "100"}
    command = [sys.executable, "-c", ON_A_TERMINAL]
    child = subprocess.Popen(command, stderr=theirs, stdout=theirs, cwd=ROOT, env=env)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other end is closed
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert child.wait(30) == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert lines.count("a line of a child") == 4
    assert lines.count("a line of our own") == 4
    assert any("weights" in line and "3/3" in line for line in lines)
    assert lines[-2] == "after"

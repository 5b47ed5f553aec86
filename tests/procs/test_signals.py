"""SIGTERM and SIGINT while `trireme serve` starts: it ends at once, with the shell's exit status, no child and no traceback."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import ROOT, free_port, wait_for
from tests.models.tiny import make_stub
from trireme.launch.processes.interrupts import StartGuard
from trireme.transport.process.prespawn import prespawn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LEAVE_S = 5.0  # for a machine that is busy; it takes a tenth of a second


class Start:
    """`trireme serve` from its first instruction on that a signal can be dealt with, and all its descendants."""

    def __init__(self, model: Path, *flags: str) -> None:
        self.mark = f"start-{uuid.uuid4().hex}"  # also of those whose parent has died
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "trireme.launch.cli", "serve", str(model), "--worker", "fake", "--dp", "2"]
        self.process = subprocess.Popen(
            [*command, "--port", str(free_port()), *flags],
            cwd=ROOT,
            env={**os.environ, "MARK_OF_THIS_START": self.mark},
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        wait_for(self._catches, 30, "signals are caught")

    def _catches(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return all(caught >> (number - 1) & 1 for number in SIGNALS)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def living(self) -> list[int]:
        """Processes with our mark in their environment that are not dead yet."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    is_dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                    if not is_dead and self.mark.encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def close(self) -> None:
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self.log.close()


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def run_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where servers keep their sockets; empty at the end."""
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)
        assert list(Path(short).glob("trireme-*")) == []


# The first is while the launcher imports, the last when all is ready.
MOMENTS = [0.0, *(moment / 1000 for moment in random.Random(17).sample(range(2000), 6))]


@pytest.mark.parametrize("after_s", MOMENTS, ids=lambda after_s: f"{after_s:.2f} s")
def test_a_signal_at_any_moment_of_a_start_ends_it_and_all_its_parts(
    stub: Path, run_dirs: Path, after_s: float
) -> None:
    starts = {number: Start(stub, "--drain-notice", "0") for number in SIGNALS}
    try:
        time.sleep(after_s)
        for number, start in starts.items():
            start.send(number)
        sent = time.monotonic()
        for number, start in starts.items():
            status = start.process.wait(LEAVE_S + 5)
            took_s, living, output = time.monotonic() - sent, start.living(), start.output()
            assert living == [], output
            assert status == (0 if "ready in" in output else 128 + number), output
            assert took_s < LEAVE_S, output
            assert "Traceback" not in output
    finally:
        for start in starts.values():
            start.close()


def test_a_second_signal_while_a_start_is_ended_changes_nothing(stub: Path, run_dirs: Path) -> None:
    start = Start(stub)
    try:
        wait_for(lambda: len(start.living()) > 1, 30, "the first part")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            start.send(number)
        assert start.process.wait(LEAVE_S) in (
            128 + signal.SIGTERM,
            128 + signal.SIGINT,
        )  # at once: either is the first
        assert start.living() == []
        assert start.output() == ""
    finally:
        start.close()


def test_a_second_signal_while_it_drains_ends_it_with_its_own_status(stub: Path, run_dirs: Path) -> None:
    start = Start(stub, "--drain-notice", "30")
    try:
        wait_for(lambda: "ready in" in start.output(), 60, "ready")
        start.send(signal.SIGTERM)
        wait_for(lambda: "SIGTERM: finishing what runs" in start.output(), 10, "the drain")
        assert start.process.poll() is None
        start.send(signal.SIGTERM)
        assert start.process.wait(LEAVE_S) == 128 + signal.SIGTERM
        assert start.living() == []
    finally:
        start.close()


@pytest.mark.parametrize("role", ["coordinator", "engine"])
def test_a_child_ignores_the_signals_of_its_parent_from_its_first_instruction_on(role: str) -> None:
    """A terminal, or a service manager that means everybody, may send them to all processes of a server."""
    with tempfile.TemporaryFile() as log:
        module = f"trireme.{role if role == 'coordinator' else 'engine_core'}.main"
        prespawned = prespawn(module, "spare", output=log.fileno())
        try:
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                for number in SIGNALS:
                    prespawned.process.send_signal(number)
                time.sleep(0.01)
            assert prespawned.process.poll() is None
            blocked = Path(f"/proc/{prespawned.process.pid}/status").read_text().partition("SigBlk:")[2].split()[0]
            assert int(blocked, 16) == 0
            log.seek(0)
            assert log.read() == b""
        finally:
            prespawned.discard()


# ---------------------------------------------------------------- the guard alone


def test_what_a_start_has_made_is_ended_last_first_whatever_one_of_them_says() -> None:
    said: list[object] = []
    with StartGuard(said.append) as guard:
        guard.ends += [lambda: said.append("first"), lambda: said.append(1 // 0), lambda: said.append("third")]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert said == ["third", "first", signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_signal_waits_for_what_is_being_made() -> None:
    said: list[object] = []
    with StartGuard(said.append) as guard, guard.held():
        os.kill(os.getpid(), signal.SIGINT)
        guard.ends.append(lambda: said.append("ended"))
        said.append("made")
    assert said == ["made", "ended", signal.SIGINT]


def test_whoever_takes_over_hears_of_signals_and_nothing_else_happens() -> None:
    heard: list[int] = []
    with StartGuard() as guard:
        guard.hand_over(heard.append)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == [signal.SIGTERM, signal.SIGINT]

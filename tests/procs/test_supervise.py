"""The supervisor over fake engines and front ends, with the real coordinator: start, kill, freeze, drain, orphans."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.procs.deployment import descendants, is_alive, wait_for
from tests.procs.supervised import MODULES, TIMING, config_for
from tests.procs.undying import undying
from trireme.errors import ConfigError
from trireme.launch.processes.events import AllReady, Died, Event, Restarted
from trireme.launch.processes.supervisor import Supervisor
from trireme.transport.wire.messages import Failed, Progress, Ready

ROOT = Path(__file__).resolve().parent.parent.parent


def comm(pid: int) -> str:
    """The name of a process, at most 15 letters of it."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


class Run:
    """A Supervisor stepped by the test, and all its events."""

    def __init__(self, directory: Path, dp: int = 1, fronts: int = 1, **options: Any) -> None:
        self.directory = directory
        self.events: list[Event] = []
        self.supervisor = Supervisor(
            config_for(directory, dp, fronts, **options), self.events.append, modules=MODULES, timing=TIMING
        )

    def until(self, condition: Callable[[], Any], timeout_s: float = 40.0) -> float:
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout_s, (f"not true within {timeout_s} s", self.events[-5:])
            assert not self.supervisor.is_finished, self.supervisor.failed
            self.supervisor.step(0.05)
        return time.monotonic() - start

    def until_ready(self) -> None:
        self.supervisor.start()
        self.until(lambda: self.supervisor.is_ready)

    def until_finished(self, timeout_s: float = 20.0) -> None:
        start = time.monotonic()
        while not self.supervisor.is_finished:
            assert time.monotonic() - start < timeout_s
            self.supervisor.step(0.05)

    def pid(self, name: str, epoch: int = 0) -> int:
        return int((self.directory / f"{name}.{epoch}.pid").read_text())

    def has(self, kind: type, **fields: Any) -> bool:
        return any(
            isinstance(e, kind) and all(getattr(e, key) == value for key, value in fields.items()) for e in self.events
        )

    def ask(self) -> dict[str, Any]:
        """State of whichever front end takes the connection."""
        assert self.supervisor.address is not None
        return ask(self.supervisor.address[1])


def ask(port: int) -> dict[str, Any]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
    return msgspec.json.decode(data, type=dict[str, Any])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        runs.append(Run(tmp_path, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.supervisor.close()
    assert not descendants(os.getpid())


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_everything_starts_serves_and_leaves_no_trace(start: Callable[..., Run], transport: str) -> None:
    run = start(dp=2, fronts=2, transport=transport)
    run.until_ready()
    ready = run.events[-1]
    assert isinstance(ready, AllReady)
    assert list(ready.parts) == ["coordinator", "engine-0", "engine-1", "front-0", "front-1"]
    assert run.has(Progress, source="engine-0", phase="load")
    wait_for(lambda: run.ask()["view"] == [[0, "ready"], [0, "ready"]])
    assert run.ask()["engines"] == [0, 0]
    run_dir = run.supervisor.boot_for("front", "x").run_dir
    assert os.stat(run_dir).st_mode & 0o777 == 0o700
    pids = descendants(os.getpid())
    assert len(pids) == 9  # two of them workers, a coordinator's next life, and who looks after the run directory
    run.supervisor.request_stop("test")
    run.until_finished()
    run.supervisor.close()
    wait_for(lambda: not any(is_alive(pid) for pid in pids), 5.0)
    assert not Path(run_dir).exists()
    assert run.supervisor.exit_code == 0
    assert (run.directory / "front-0.drain").read_text() == "1.0 0.0"


def test_a_taken_port_is_a_config_error_before_anything_starts(start: Callable[..., Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = start(port=port)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1 port {port}: Address already in use") as e:
            run.supervisor.start()
        assert "--port" in e.value.hint
        assert not descendants(os.getpid())


def test_a_failure_during_the_first_start_is_fatal_with_its_own_error(start: Callable[..., Run]) -> None:
    run = start(dp=2)
    (run.directory / "engine-1.order").write_text("fail")
    run.supervisor.start()
    run.until_finished(40)
    failed = run.supervisor.failed
    assert failed is not None
    assert (failed.source, failed.error) == ("engine-1", "model.gguf is cut off at byte 17")
    assert failed.hint == "download it again"
    assert run.supervisor.exit_code == 3
    assert not run.has(AllReady)
    assert not run.has(Died)


def test_a_part_that_does_not_become_ready_is_named_with_its_last_step(start: Callable[..., Run]) -> None:
    run = start(start_timeout=12.0)
    (run.directory / "engine-0.order").write_text("hang")
    run.supervisor.start()
    run.until_finished(40)
    assert run.supervisor.failed is not None
    assert run.supervisor.failed.error == "engine-0 did not become ready within 12 s; its last step was load 1/2"


def test_the_late_part_is_named_even_when_all_deadlines_have_passed_at_once(start: Callable[..., Run]) -> None:
    run = start(start_timeout=8.0)
    (run.directory / "engine-0.order").write_text("hang")
    run.supervisor.start()
    time.sleep(8.0 + TIMING.after_engines_s + 0.5)  # as on a machine that stood still: the front end is late too
    run.until_finished(40)
    assert run.supervisor.failed is not None
    assert run.supervisor.failed.error.startswith("engine-0 did not become ready within 8 s")
    assert run.supervisor.failed.source == "engine-0"


def test_killed_parts_are_restarted_in_place_while_the_others_go_on(start: Callable[..., Run]) -> None:
    run = start(dp=2, fronts=2)
    run.until_ready()
    run.until(lambda: run.ask()["view"] == [[0, "ready"], [0, "ready"]])
    before = {name: run.pid(name) for name in ("engine-0", "engine-1", "front-0", "front-1")}

    worker = descendants(before["engine-1"])
    assert len(worker) == 1
    os.kill(before["engine-1"], signal.SIGKILL)
    assert run.until(lambda: run.has(Died, name="engine-1")) < 1.0
    assert run.ask()["engines"][0] == 0  # front ends answer meanwhile
    assert run.until(lambda: not is_alive(worker[0])) < 1.0
    run.until(lambda: run.has(Restarted, name="engine-1", epoch=1))
    run.until(lambda: run.ask()["engines"] == [0, 1])
    run.until(lambda: run.ask()["view"] == [[0, "ready"], [1, "ready"]])

    coordinator = next(part.child.pid for part in run.supervisor.parts if part.role == "coordinator" and part.child)
    os.kill(coordinator, signal.SIGKILL)
    assert run.until(lambda: run.ask()["coordinator"] == -1) < 1.0
    assert run.ask()["view"] == [[0, "ready"], [1, "ready"]]  # the last view is kept
    assert run.until(lambda: run.ask()["coordinator"] == 1) < 2.0
    run.until(lambda: run.ask()["view"] == [[0, "ready"], [1, "ready"]])

    os.kill(before["front-0"], signal.SIGKILL)
    run.until(lambda: run.has(Died, name="front-0"))
    assert run.ask()["name"] == "front-1"
    run.until(lambda: run.has(Restarted, name="front-0", epoch=1))
    run.until(lambda: run.ask()["name"] == "front-0")  # both share the listening socket

    died = [(e.name, e.error, e.restart_s) for e in run.events if isinstance(e, Died)]
    assert died == [
        ("engine-1", "engine-1 was killed by SIGKILL", 0.1),
        ("coordinator", "coordinator was killed by SIGKILL", 0.05),
        ("front-0", "front-0 was killed by SIGKILL", 0.1),
    ]
    assert {name: is_alive(pid) for name, pid in before.items()} == {
        "engine-0": True, "engine-1": False, "front-0": False, "front-1": True
    }  # fmt: skip


def test_the_coordinators_next_life_waits_and_is_not_relied_on(start: Callable[..., Run]) -> None:
    def pid_of(run: Run) -> int:
        return next(part.child.pid for part in run.supervisor.parts if part.role == "coordinator" and part.child)

    def spares() -> list[int]:
        return [pid for pid in descendants(os.getpid()) if comm(pid).startswith("spare-")]

    run = start(dp=2)
    run.until_ready()
    for epoch in (1, 2):
        run.until(lambda: len(spares()) == 1)
        (spare,) = spares()
        os.kill(pid_of(run), signal.SIGKILL)
        run.until(lambda epoch=epoch: run.ask()["coordinator"] == epoch)
        assert pid_of(run) == spare
        assert comm(spare) == "coordinator"
    run.until(lambda: len(spares()) == 1)
    for pid in (*spares(), pid_of(run)):
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.ask()["coordinator"] == 3)
    run.until(lambda: len(spares()) == 1)
    run.supervisor.close()
    wait_for(lambda: not descendants(os.getpid()), 5.0)


def test_a_frozen_engine_is_killed_and_restarted(start: Callable[..., Run]) -> None:
    run = start()
    run.until_ready()
    run.until(lambda: all(part.child and part.child.last_beat for part in run.supervisor.parts[:1]))
    os.kill(run.pid("engine-0"), signal.SIGSTOP)
    run.until(lambda: run.has(Died, error="engine-0 made no iteration of its loop for 2.5 s"), 6.0)
    run.until(lambda: run.has(Restarted, name="engine-0"))
    run.until(lambda: run.ask()["engines"] == [1])


def test_an_engine_that_the_system_keeps_holds_up_nobody(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    """It cannot be ended. Its next life begins all the same, others are watched meanwhile, and the end does not wait."""
    run = start(dp=2)
    run.until_ready()
    run.until(lambda: all(part.child and part.child.last_beat for part in run.supervisor.parts[:3]))
    pid = run.pid("engine-0")
    with undying(pid):
        os.kill(pid, signal.SIGKILL)  # it holds its sockets and beats no more
        run.until(lambda: run.has(Died, name="engine-0"), 6.0)
        os.kill(run.pid("engine-1"), signal.SIGKILL)
        assert run.until(lambda: run.has(Died, name="engine-1")) < 1.0
        run.until(lambda: run.has(Restarted, name="engine-1", epoch=1))
        run.until(lambda: run.has(Restarted, name="engine-0", epoch=1))
        run.until(lambda: run.ask()["engines"] == [1, 1])
        assert f"name=engine-0 pid={pid} state=t" in caplog.text
        began = time.monotonic()
        run.supervisor.request_stop("one")
        run.supervisor.request_stop("two")
        run.until_finished(1.0)
        run.supervisor.close()
        assert time.monotonic() - began < 1.0 + TIMING.close_s
        assert f"left behind, as the system does not end it. name=engine-0 pid={pid}" in caplog.text


def test_a_part_in_want_of_what_its_former_life_holds_is_tried_for_as_long_as_that_lasts(
    start: Callable[..., Run],
) -> None:
    run = start(dp=2)
    run.until_ready()
    run.until(lambda: all(part.child and part.child.last_beat for part in run.supervisor.parts[:3]))
    pid = run.pid("engine-0")
    with undying(pid):
        (run.directory / "engine-0.order").write_text("fail again")
        os.kill(pid, signal.SIGKILL)
        most = TIMING.restarts.most or 0
        run.until(lambda: sum(isinstance(e, Died) and e.name == "engine-0" for e in run.events) > most + 2)
        assert not run.has(Died, restart_s=None)
        (run.directory / "engine-0.order").unlink()
        run.until(lambda: run.has(Restarted, name="engine-0"))


def test_a_pause_of_the_whole_deployment_kills_nobody(start: Callable[..., Run]) -> None:
    run = start(dp=2)
    run.until_ready()
    run.until(lambda: all(part.child and part.child.last_beat for part in run.supervisor.parts[:3]))
    pids = descendants(os.getpid())
    for number, pause_s in ((signal.SIGSTOP, 2 * TIMING.stuck_s), (signal.SIGCONT, 0.0)):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(pause_s)
        run.supervisor.step(0.0)  # it is the first one to go on
    before = time.monotonic()
    run.until(lambda: time.monotonic() - before > TIMING.stuck_s + 1.0)
    assert not run.has(Died)
    os.kill(run.pid("engine-1"), signal.SIGSTOP)
    run.until(lambda: run.has(Died, name="engine-1"), 6.0)


def test_a_crash_loop_ends_with_the_part_down_and_the_others_serving(start: Callable[..., Run]) -> None:
    run = start(dp=2)
    run.until_ready()
    for engine in (1, 0):
        (run.directory / f"engine-{engine}.order").write_text("fail again")
        os.kill(run.pid(f"engine-{engine}"), signal.SIGKILL)
        if engine == 1:
            run.until(lambda: run.has(Died, name="engine-1", restart_s=None))
            assert [e.restart_s for e in run.events if isinstance(e, Died)] == [0.1, 0.2, 0.4, None]
            assert run.ask()["engines"] == [0, -1]
    run.until_finished(40)  # no engine is left that could ever come back
    assert run.supervisor.failed is not None
    assert run.supervisor.failed.error == "out of memory"
    assert run.supervisor.exit_code == 3


def test_an_impatient_second_stop_kills(start: Callable[..., Run]) -> None:
    run = start()
    (run.directory / "front-0.order").write_text("drain slowly")
    run.until_ready()
    run.supervisor.request_stop("one")
    run.until(lambda: (run.directory / "front-0.drain").exists())
    run.supervisor.request_stop("two")
    run.until_finished(0.5)
    assert run.supervisor.exit_code == 130


def test_a_front_end_that_does_not_drain_is_given_up_at_its_deadline(start: Callable[..., Run]) -> None:
    run = start()
    (run.directory / "front-0.order").write_text("drain slowly")
    run.until_ready()
    run.supervisor.request_stop("test", notice_s=0.25)
    begun = time.monotonic()
    run.until_finished(10)
    assert 2.2 < time.monotonic() - begun < 5.0  # notice + deadline + clean-up
    assert (run.directory / "front-0.drain").read_text() == "1.0 0.25"


def test_without_front_ends_there_is_no_port(start: Callable[..., Run]) -> None:
    run = Run(start().directory)
    supervisor = Supervisor(
        config_for(run.directory, 1, 1), run.events.append, modules=MODULES, num_fronts=0, timing=TIMING
    )
    run.supervisor = supervisor
    try:
        run.until_ready()
        assert supervisor.address is None
        assert [part.name for part in supervisor.parts] == ["engine-0"]
        assert run.has(Ready, source="engine-0")
    finally:
        supervisor.close()


# ---------------------------------------------------------------- the supervisor as a process of its own


class Launched:
    """`tests.procs.supervised` with a temporary directory of its own, so that what it leaves there can be seen."""

    def __init__(self, directory: Path, dp: int = 2, fronts: int = 2, port: int = 0) -> None:
        self.directory = directory
        self.tmp = Path(tempfile.mkdtemp(prefix="tri", dir="/tmp"))  # short: unix socket paths are
        command = [sys.executable, "-m", "tests.procs.supervised", str(directory), str(dp), str(fronts), str(port)]
        env = {**os.environ, "TMPDIR": str(self.tmp)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env)

    def line(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"no line {start!r}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        wait_for(lambda: not list(self.tmp.iterdir()), 5.0, "the children have removed the run directory")
        self.tmp.rmdir()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def make(**options: Any) -> Launched:
        launched.append(Launched(tmp_path, **options))
        return launched[-1]

    yield make
    for each in launched:
        each.close()


@pytest.mark.parametrize("moment", ["loading", "serving"])
def test_o24_nothing_survives_a_sigkill_of_the_supervisor(launch: Callable[..., Launched], moment: str) -> None:
    run = launch()
    port = int(run.line("ready").split()[1]) if moment == "serving" else 0
    if moment == "loading":
        run.line("Progress")
    pids = descendants(run.process.pid)
    assert len(pids) >= 5
    assert list(run.tmp.iterdir())
    if moment == "serving":
        os.kill(int((run.directory / "engine-0.0.pid").read_text()), signal.SIGSTOP)
    run.process.kill()
    run.process.wait()
    gone_s = wait_for(lambda: not any(is_alive(pid) for pid in pids), 5.0)
    assert gone_s < 5.0
    wait_for(lambda: not list(run.tmp.iterdir()), 5.0)
    if port:
        again = launch(port=port)
        assert again.line("ready") == f"ready {port}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_the_exit_code_is_zero(launch: Callable[..., Launched], number: int) -> None:
    run = launch(dp=1, fronts=1)
    run.line("ready")
    os.kill(run.process.pid, number)
    assert run.line("stopped") == "stopped 0"
    assert run.process.wait(10) == 0
    notice = 0.25 if number == signal.SIGTERM else 0.0
    assert (run.directory / "front-0.drain").read_text() == f"1.0 {notice}"


def test_a_failed_start_prints_the_cause_once_and_last(launch: Callable[..., Launched], tmp_path: Path) -> None:
    (tmp_path / "engine-0.order").write_text("fail")
    run = launch(dp=1, fronts=1)
    assert run.process.stdout is not None
    lines = run.process.stdout.read().splitlines()
    assert lines[-1] == "stopped 3 model.gguf is cut off at byte 17"
    assert sum("cut off" in line for line in lines) == 1
    assert run.process.wait(10) == 3
    assert Failed.__name__ not in lines

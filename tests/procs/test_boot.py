"""Birth, reports and death of child processes over the boot channel."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.procs.deployment import Deployment, descendants, is_alive, ready_of, wait_for
from tests.procs.undying import undying
from trireme.transport.process.boot import Child, Report, reap, spawn
from trireme.transport.process.prespawn import prespawn
from trireme.transport.process.rundir import RunDir, sweep_run_dirs
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.messages import Failed, Progress, Ready, Role


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.close()


def ignores(pid: int, number: int) -> bool:
    (mask,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def reports_until_death(child: Child) -> list[Report]:
    reports: list[Report] = []
    poller = Poller()
    poller.add(child, lambda: reports.extend(child.receive()))
    deadline = time.monotonic() + 30
    while not child.is_dead and time.monotonic() < deadline:
        poller.wait(1.0)
    return reports


def test_a_child_reports_progress_and_readiness_and_drains(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", until_ready=False, do="work")
    reports: list[object] = []
    wait_for(lambda: reports.extend(child.receive()) or child.is_ready, 30)
    assert [(r.phase, r.done, r.total) for r in reports if isinstance(r, Progress)][-1] == ("load", 3, 3)
    ready = next(r for r in reports if isinstance(r, Ready))
    assert ready.facts == {"pid": child.pid, "stdin": ""}  # stdin is no longer the channel
    assert ready.decisions == [("a", "b", "c")]
    child.drain(7.5)
    assert reports_until_death(child) == [Progress("engine-0", "drained 7.5", 1, 1)]
    assert child.exit_code == 0


@pytest.mark.parametrize(
    ("orders", "error", "hint", "exit_code"),
    [
        ({"do": "raise"}, "layer 7 is missing", "download the file again", 3),
        ({"do": "crash"}, "ZeroDivisionError: seven by zero", "", 1),
        ({"do": "exit", "code": 7}, "engine-0 ended with exit code 7", "", 7),
        ({"do": "segv"}, "engine-0 was killed by SIGSEGV", "", 1),
    ],
)
def test_a_childs_own_error_reaches_the_parent_once_and_last(
    deployment: Deployment, orders: dict[str, object], error: str, hint: str, exit_code: int
) -> None:
    child = deployment.start("engine", "engine-0", until_ready=False, **orders)
    reports = reports_until_death(child)
    assert len(reports) == 1
    failed = reports[0]
    assert isinstance(failed, Failed)
    assert (failed.source, failed.error, failed.hint, failed.exit_code) == ("engine-0", error, hint, exit_code)
    if orders["do"] in ("raise", "crash"):
        assert 'fake_child.py", line' in failed.traceback
    assert child.receive() == []


def test_a_hatched_child_becomes_what_its_boot_says(deployment: Deployment) -> None:
    """It waits with its imports done; a listening socket reaches it under a number of its own."""
    prespawned = prespawn("tests.procs.fake_child", "front-0")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        orders = msgspec.json.encode({"do": "work"})
        boot = deployment.boot("front", "front-0", config=orders)
        boot = msgspec.structs.replace(boot, listen_fd=listener.fileno())
        child = spawn("tests.procs.fake_child", boot, prespawned=prespawned)
        deployment.children.append(child)
        facts = ready_of(child).facts
        assert facts["pid"] == prespawned.process.pid == child.pid
        links = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert os.readlink(f"/proc/self/fd/{listener.fileno()}") in links


def test_an_egg_that_is_not_needed_ends(deployment: Deployment) -> None:
    discarded, forgotten = (prespawn("tests.procs.fake_child", "front-0") for _ in range(2))
    discarded.discard()
    assert discarded.process.returncode == -signal.SIGKILL
    forgotten.channel.close()
    assert forgotten.process.wait(30) == 0


def test_a_module_that_cannot_be_imported_is_named(deployment: Deployment) -> None:
    child = spawn("tests.procs.no_such_module", deployment.boot("engine", "engine-0"))
    deployment.children.append(child)
    (failed,) = reports_until_death(child)
    assert isinstance(failed, Failed)
    assert "no_such_module" in failed.error


def test_sigkill_is_noticed_and_named(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", do="work")
    os.kill(child.pid, signal.SIGKILL)
    start = time.monotonic()
    reports = reports_until_death(child)
    assert time.monotonic() - start < 1.0
    assert isinstance(reports[-1], Failed)
    assert reports[-1].error == "engine-0 was killed by SIGKILL"
    assert child.exit_code == -signal.SIGKILL


def test_ending_a_child_that_the_system_keeps_waits_for_nobody(
    deployment: Deployment, caplog: pytest.LogCaptureFixture
) -> None:
    child, other = (deployment.start("engine", f"engine-{i}", do="work") for i in range(2))
    with undying(child.pid):
        began = time.monotonic()
        child.kill()
        child.kill()
        assert time.monotonic() - began < 0.2
        assert not child.is_gone
        began = time.monotonic()
        assert reap([child, other], 0.5) == [child]
        assert time.monotonic() - began < 1.5
        assert other.is_gone
        assert f"name=engine-0 pid={child.pid} state=t" in caplog.text
    assert child.wait(5.0)
    assert child.exit_code == -signal.SIGKILL


def test_a_child_whose_channel_ends_is_told_dead_though_its_process_stays(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", do="close")
    began = time.monotonic()
    with undying(child.pid):
        reports = reports_until_death(child)
        assert time.monotonic() - began < 3.0
        assert isinstance(reports[-1], Failed)
        assert f"the system keeps its process {child.pid} in state t" in reports[-1].error
    assert child.wait(5.0)


def test_children_ignore_the_terminals_signals(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", do="work")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    assert not child.wait(0.3)
    assert os.getpgid(child.pid) == child.pid


def test_a_grandchild_dies_with_its_parent_even_when_stopped(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", until_ready=False, do="parent")
    grandchild = ready_of(child).facts["grandchild"]
    os.kill(grandchild, signal.SIGSTOP)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(grandchild), 5.0)


def test_closing_the_channel_ends_a_child_of_any_thread(deployment: Deployment) -> None:
    """Not started by the main thread: the kernel's parent-death signal is not used, the child's watcher is."""
    started: list[Child] = []
    thread = threading.Thread(target=lambda: started.append(deployment.start("engine", "engine-0", do="work")))
    thread.start()
    thread.join()
    child = started[0]
    assert not child.wait(0.3)  # it outlives the thread
    child._channel.close()
    assert child.wait(5.0)


@pytest.mark.parametrize("role", ["front", "coordinator", "worker"])
def test_a_child_that_holds_the_interpreter_dies_with_its_parent(deployment: Deployment, role: Role) -> None:
    """None of its threads can run, so the kernel must end it."""
    child = deployment.start("engine", "engine-0", until_ready=False, do="parent", kind=role, then="hold")
    grandchild = ready_of(child).facts["grandchild"]
    wait_for(lambda: Path(f"/proc/{grandchild}/wchan").exists(), 5.0)
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(grandchild), 5.0)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_run_directory_of_a_killed_maker_is_removed(is_stopped: bool) -> None:
    """Also when all processes had been stopped before."""
    code = "import time\nfrom trireme.transport.process.rundir import RunDir\nprint(RunDir().path, flush=True)\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        path = Path(maker.stdout.readline().strip())
        (path / "engine-0.front").touch()
        (caretaker,) = descendants(maker.pid)
        if is_stopped:
            wait_for(lambda: ignores(caretaker, signal.SIGHUP), 10.0)
            os.kill(caretaker, signal.SIGSTOP)
            wait_for(lambda: Path(f"/proc/{caretaker}/stat").read_text().rpartition(")")[2].split()[0] == "T", 10.0)
        maker.kill()
        wait_for(lambda: not path.exists(), 5.0)
        wait_for(lambda: not is_alive(caretaker), 5.0)


def test_beats_are_counted(deployment: Deployment) -> None:
    child = deployment.start("engine", "engine-0", do="beat")
    wait_for(lambda: child.receive() == [] and child.last_beat > 0)
    first = child.progress
    wait_for(lambda: child.receive() == [] and child.progress > first)
    os.kill(child.pid, signal.SIGSTOP)
    child.receive()
    last = child.last_beat
    time.sleep(1.2)
    child.receive()
    assert child.last_beat == last


def test_run_directories_left_behind_are_swept_and_used_ones_are_not() -> None:
    used, left = RunDir(), RunDir()
    os.close(left._lock)  # as when its maker is killed, and its caretaker too
    left._lock = -1
    left._caretaker.kill()
    left._caretaker.communicate()
    sweep_run_dirs()
    assert Path(used.path).exists()
    assert not Path(left.path).exists()
    assert os.stat(used.path).st_mode & 0o777 == 0o700
    used.remove()
    used.remove()
    assert not Path(used.path).exists()

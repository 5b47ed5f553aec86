"""What one test starts, gone at its end: a run directory and fake children, or a supervisor. Fixtures are in the test modules."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from trireme.launch.processes.managed_process import ManagedProcess
from trireme.launch.processes.supervisor import Supervisor
from trireme.transport.process.boot import Child, reap, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.wire.messages import Boot, Ready, Role

HASH = b"h" * 32


class Deployment:
    """`boot` for this process, `start` for a child that runs tests.procs.fake_child."""

    def __init__(self, secret_keys: dict[str, bytes] | None = None) -> None:
        self.run_dir = RunDir()
        self.secret_keys = secret_keys or {}
        self.children: list[Child] = []

    def boot(self, role: Role, name: str, epoch: int = 0, config_hash: bytes = HASH, config: bytes = b"") -> Boot:
        return Boot(role, name, epoch, config, config_hash, self.run_dir.path, secret_keys=self.secret_keys)

    def start(self, role: Role, name: str, epoch: int = 0, *, until_ready: bool = True, **orders: Any) -> Child:
        child = spawn("tests.procs.fake_child", self.boot(role, name, epoch, config=msgspec.json.encode(orders)))
        self.children.append(child)
        if until_ready:
            ready_of(child)
        return child

    def close(self) -> None:
        reap(self.children, 5.0)
        self.run_dir.remove()


def ready_of(child: Child, timeout_s: float = 30.0) -> Ready:
    """Waits for the child's Ready."""
    found: list[Ready] = []

    def look() -> bool:
        reports = child.receive()
        assert not child.is_dead, reports
        found.extend(report for report in reports if isinstance(report, Ready))
        return bool(found)

    wait_for(look, timeout_s)
    return found[0]


def wait_for(condition: Callable[[], Any], timeout_s: float = 10.0, what: str = "", *, each_s: float = 0.005) -> float:
    """Seconds until `condition()` was true; AssertionError after `timeout_s`. `what` is what the condition says, in words."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not true within {timeout_s} s: {what}"
        time.sleep(each_s)
    return time.monotonic() - start


def is_alive(pid: int) -> bool:
    """False for zombies too: they hold nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`, by /proc."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] not in "ZX":
                parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Supervised:
    """A supervisor in a thread of its own, for as long as the `with` lasts. Subclasses say when it is up."""

    up_s = 60.0

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor = supervisor
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def is_up(self) -> bool:
        return self.supervisor.is_ready

    @property
    def port(self) -> int:
        assert self.supervisor.address is not None
        return self.supervisor.address[1]

    def part(self, name: str) -> ManagedProcess:
        return next(part for part in self.supervisor.parts if part.name == name)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for(lambda: self.supervisor.is_ready and self.is_up(), self.up_s)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(20)

    def _run(self) -> None:
        self.supervisor.start()
        while not self.supervisor.is_finished and not self._stop:
            self.supervisor.step(0.2)
        self.supervisor.close()

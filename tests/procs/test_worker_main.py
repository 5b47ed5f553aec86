"""One worker process behind its socket: loads, serves plans, answers calls, reports its own death, follows its engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.models.tiny import make_stub
from tests.procs.engine_process import make_config, write_fake_model
from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from trireme.engine_core.executor.procs import _error_of
from trireme.errors import ModelError
from trireme.params import RowParams
from trireme.transport.process.boot import Child, reap, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.names import Disconnected, Peer, Poller, Server
from trireme.transport.wire.codec import decode, encode
from trireme.transport.wire.messages import (
    Boot,
    Call,
    CallReply,
    Failed,
    Hello,
    SetupKV,
    StepResult,
    Wire,
    WorkerFault,
    WorkerInit,
    WorkerLoaded,
    WorkerReady,
    WorkerToCore,
)
from trireme.workers.main import MODULES, WorkerShell, _fault

GREEDY = RowParams(20, temperature=0.0)


class Core:
    """The engine core's side of one worker."""

    def __init__(self, model: Path, kind: str) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(model), max_len=64),
            cache=CacheConfig(block_size=4),
            parallel=ParallelConfig(worker=kind, threads=1),  # type: ignore[arg-type]
        )
        self.config = msgspec.msgpack.encode(config)
        self.run_dir = RunDir()
        engine = Boot("engine", "engine-0", 0, self.config, b"hash", self.run_dir.path)
        self.server = Server.open(engine, "engine-0.workers", WorkerToCore, silence_s=None)
        boot = Boot("worker", "engine-0.worker-0", 0, self.config, b"hash", self.run_dir.path, index=0)
        self.child: Child = spawn("trireme.workers.main", boot)
        self.inbox: list[Any] = []
        self.reports: list[Any] = []
        self.peer: Peer | None = None
        self.poller = Poller()
        self.poller.add(self.server, self._receive)
        self.poller.add(self.child, lambda: self.reports.extend(self.child.receive()))

    def _receive(self) -> None:
        for peer, message in self.server.receive():
            if isinstance(message, Hello):
                self.peer = peer
            self.inbox.append(message)

    def until(self, kind: type | Callable[[], bool], timeout_s: float = 30.0) -> Any:
        """Waits for a message of `kind` (taken from the inbox) or for a condition."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if isinstance(kind, type):
                for message in self.inbox:
                    if isinstance(message, kind):
                        self.inbox.remove(message)
                        return message
            elif kind():
                return None
            self.poller.wait(0.05)
        raise AssertionError(f"no {kind} within {timeout_s} s; inbox {self.inbox}, reports {self.reports}")

    def send(self, message: Wire) -> None:
        assert self.peer is not None
        assert self.server.send(self.peer, message)

    def start(self) -> WorkerLoaded:
        self.until(Hello)
        self.send(WorkerInit(self.config, 0, 0))
        loaded: WorkerLoaded = self.until(WorkerLoaded)
        self.send(SetupKV(32))
        self.until(WorkerReady)
        return loaded

    def close(self) -> None:
        reap([self.child], 5.0)
        self.server.close(0.0)
        self.run_dir.remove()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Core]]:
    cores: list[Core] = []

    def make(kind: str) -> Core:
        model = make_stub(tmp_path / "stub", scripts=[[104, 105, 106]])
        cores.append(Core(model, kind))
        return cores[-1]

    yield make
    for core in cores:
        core.close()


@pytest.mark.parametrize("kind", ["fake", "torch"])
def test_a_worker_process_serves_plans_and_calls(start: Callable[[str], Core], kind: str) -> None:
    core = start(kind)
    assert core.start().vocab_size == 259
    new = [new_row(0, [1, 2, 3], GREEDY, blocks=[0])]
    core.send(plan_of(step=1, new=new, rows=[0], num_tokens=[3]))
    core.send(plan_of(step=2, blocks=[(0, [1])], rows=[0], num_computed=[3], tokens=[-1]))
    results = [core.until(StepResult), core.until(StepResult)]
    assert [(r.step, *rows_and_tokens(r)) for r in results] == [(1, [0], [104]), (2, [0], [105])]
    core.send(Call(7, "info"))
    assert core.until(CallReply).result["pid"] == core.child.pid
    core.send(Call(8, "dance"))
    reply = core.until(CallReply)
    assert (reply.call_id, reply.ok) == (8, False)
    assert "dance" in reply.error


def test_an_exception_is_reported_with_its_cause_and_ends_the_worker(start: Callable[[str], Core]) -> None:
    core = start("fake")
    core.start()
    core.send(plan_of(rows=[3]))  # no such row
    fault = core.until(WorkerFault)
    assert fault.error.startswith("KeyError")
    assert "Traceback" in fault.traceback
    core.until(Disconnected)
    core.until(lambda: any(isinstance(report, Failed) and "KeyError" in report.error for report in core.reports))
    assert core.child.wait(5.0)


def test_a_worker_ends_when_its_engine_core_leaves(start: Callable[[str], Core]) -> None:
    core = start("fake")
    core.start()
    core.child.close()
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{core.child.pid}") and not core.child.wait(0.1):
        assert time.monotonic() < deadline
    assert core.child.exit_code is not None


def test_a_fault_keeps_the_kind_of_its_error():
    """Operators' scripts tell a bad model (exit 3) from a crash (exit 1), also when a worker process met it."""
    fault = _fault(1, ModelError("no such weight", hint="another file"))
    back = decode(encode(fault), WorkerFault)
    cause = _error_of(Failed("engine-0.worker-1", back.error, back.hint, back.traceback, back.exit_code))
    assert isinstance(cause, ModelError)
    assert (cause.exit_code, cause.hint) == (ModelError.exit_code, "another file")
    assert _fault(0, ValueError("x")).exit_code == 1


class Line:
    """A connection whose other end is this test."""

    def __init__(self) -> None:
        self.arrived: list[Any] = []
        self.sent: list[Any] = []

    def receive(self) -> list[Any]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[WorkerShell, Line]]]:
    """The shell of a worker that launches its steps."""
    monkeypatch.setitem(MODULES, "fake", "tests.procs.launching_worker")
    made: list[WorkerShell] = []

    def make(**fake: Any) -> tuple[WorkerShell, Line]:
        config = msgspec.msgpack.encode(make_config(write_fake_model(tmp_path / "m", **fake)))
        wire = Line()
        made.append(WorkerShell(Boot("worker", "engine-0.worker-0", 0, config, b"", "", index=0), cast(Any, wire)))
        wire.arrived += [WorkerInit(config, 0, 0), SetupKV(64)]
        made[-1].on_readable()
        assert [type(message) for message in wire.sent][-2:] == [WorkerLoaded, WorkerReady]
        wire.sent.clear()
        return made[-1], wire

    yield make
    for one in made:
        one.close()


def results_of(shell: WorkerShell, wire: Line, count: int) -> list[StepResult]:
    poller = Poller()
    poller.add(shell.waker, shell.on_results)
    deadline = time.monotonic() + 20
    while len(found := [message for message in wire.sent if isinstance(message, StepResult)]) < count:
        assert time.monotonic() < deadline
        poller.wait(0.05)
    return found


def test_a_launched_step_does_not_keep_the_next_order_waiting(shell: Callable[..., tuple[WorkerShell, Line]]) -> None:
    worker, wire = shell(delay_ms=300.0)
    first = plan_of(new=[new_row(0, [5, 6, 7], RowParams(8), blocks=[1, 2])], rows=[0], num_tokens=[3])
    wire.arrived += [first, plan_of(step=2, rows=[0], num_computed=[3], tokens=[-1]), Call(1, "started")]
    worker.on_readable()
    (reply,) = wire.sent
    assert (reply.ok, reply.result) == (True, 2)
    assert [result.step for result in results_of(worker, wire, 2)] == [1, 2]


def test_what_a_launched_step_raises_ends_the_worker(shell: Callable[..., tuple[WorkerShell, Line]]) -> None:
    worker, wire = shell(crash_token=7)
    wire.arrived.append(plan_of(new=[new_row(0, [5, 6, 7], RowParams(8), blocks=[1])], rows=[0], num_tokens=[3]))
    worker.on_readable()
    with pytest.raises(RuntimeError, match="scripted crash"):
        results_of(worker, wire, 1)

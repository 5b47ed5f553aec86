"""A real engine process on the fake worker (and its worker processes), driven over its own socket like a front end does.

Everything is cleaned up by close(); `kin` names the processes that must be gone afterwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from trireme.config import (
    CacheConfig,
    EngineConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from trireme.params import RowParams
from trireme.transport.process.boot import Child, reap, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.names import Connection, Disconnected, Poller
from trireme.transport.wire.columns import unpack, unpack_ids
from trireme.transport.wire.messages import (
    Abort,
    Boot,
    Call,
    CallReply,
    Drain,
    End,
    EngineDown,
    EngineToFront,
    Failed,
    First,
    Ready,
    StepOutputs,
    Submit,
    Welcome,
)
from trireme.workers.fake import FakeOptions, expected_tokens

HASH = b"test config hash"


def make_config(model: Path, *, tp: int = 1, pp: int = 1, executor: str = "auto", **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), max_len=200),
        cache=CacheConfig(block_size=4, num_blocks=256),
        parallel=ParallelConfig(tp=tp, pp=pp, executor=executor, worker="fake"),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**{"check": True, "max_num_seqs": 16, "max_num_tokens": 64, **scheduler}),
        launch=LaunchConfig(log_level="warning", step_timeout=5.0),
    )


def write_fake_model(directory: Path, **fake: Any) -> Path:
    """config.json for the fake worker with these FakeOptions."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 320, "fake": fake}))
    return directory


@dataclass(eq=False)
class Row:
    prompt: list[int]
    params: RowParams
    tokens: list[int] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    firsts: list[First] = field(default_factory=list)


class Front:
    """One front end's link to an engine."""

    def __init__(self, engine: Engine, name: str = "front-0") -> None:
        self.engine = engine
        self.rows: dict[int, Row] = {}
        self.welcomes: list[Welcome] = []
        self.downs: list[EngineDown] = []
        self.lefts: list[Disconnected] = []
        self.replies: list[CallReply] = []
        boot = msgspec.structs.replace(engine.boot, role="front", name=name)
        self.connection = Connection.open(boot, f"{engine.boot.name}.front", EngineToFront)
        engine.poller.add(self.connection, self.receive)

    def receive(self) -> None:
        for message in self.connection.receive():
            match message:
                case StepOutputs():
                    self._take(message)
                case Welcome():
                    self.welcomes.append(message)
                case EngineDown():
                    self.downs.append(message)
                case CallReply():
                    self.replies.append(message)
                case Disconnected():
                    self.lefts.append(message)

    def _take(self, outputs: StepOutputs) -> None:
        for rid, token in zip(unpack_ids(outputs.rids).tolist(), unpack(outputs.tokens).tolist(), strict=True):
            assert not self.rows[rid].ends, "token after the end"
            self.rows[rid].tokens.append(token)
        for first in outputs.firsts:
            self.rows[first.rid].firsts.append(first)
        for end in outputs.ends:
            assert not self.rows[end.rid].ends, "two ends"
            self.rows[end.rid].ends.append(end)

    def submit(self, prompt: list[int], max_tokens: int = 8, **params: Any) -> Row:
        row = Row(prompt, RowParams(max_tokens, temperature=0.0, **params))
        rid = len(self.rows) + 1
        self.rows[rid] = row
        assert self.connection.send(Submit(rid, np.array(prompt, np.int32), row.params, ticket=rid))
        return row

    def abort(self, *rows: Row) -> None:
        assert self.connection.send(Abort([rid for rid, row in self.rows.items() if row in rows]))

    def call(self, method: str) -> CallReply:
        before = len(self.replies)
        assert self.connection.send(Call(before + 1, method))
        self.engine.until(lambda: len(self.replies) > before, what=f"answer to {method}")
        return self.replies[-1]

    def stats(self) -> dict[str, Any]:
        reply = self.call("stats")
        assert reply.ok
        found: dict[str, Any] = reply.result
        return found

    def wait_ends(self, *rows: Row, timeout_s: float = 20.0) -> None:
        self.engine.until(lambda: all(row.ends for row in rows), timeout_s, "ends of rows")

    def close(self) -> None:
        if self.connection in self.engine.poller._callbacks:
            self.engine.poller.remove(self.connection)
            self.connection.close(0.0)


class Engine:
    """One engine process and what it reports."""

    def __init__(self, config: EngineConfig, *, wait: bool = True) -> None:
        self.config = config
        self.run_dir = RunDir()
        self.boot = Boot("engine", "engine-0", 0, msgspec.msgpack.encode(config), HASH, self.run_dir.path)
        self.poller = Poller()
        self.reports: list[Any] = []
        self.fronts: list[Front] = []
        self.kin: list[psutil.Process] = []
        self.child: Child = spawn("trireme.engine_core.main", self.boot)
        self.poller.add(self.child, self._receive)
        if wait:
            self.wait_ready()

    def _receive(self) -> None:
        self.reports += self.child.receive()
        if self.child.is_dead:
            self.poller.remove(self.child)

    def restart(self) -> None:
        """The next life, at the same addresses."""
        self.boot = msgspec.structs.replace(self.boot, epoch=self.boot.epoch + 1)
        self.reports.clear()
        reap([self.child], 5.0)
        self.child = spawn("trireme.engine_core.main", self.boot)
        self.poller.add(self.child, self._receive)
        self.wait_ready()

    def wait_ready(self) -> None:
        self.until(lambda: self.child.is_ready or self.child.is_dead, 60.0, "readiness")
        assert self.child.is_ready, self.reports
        me = psutil.Process(self.child.pid)
        self.kin = [me, *me.children(recursive=True)]

    @property
    def ready(self) -> Ready:
        return next(report for report in self.reports if isinstance(report, Ready))

    @property
    def failed(self) -> Failed:
        return next(report for report in self.reports if isinstance(report, Failed))

    @property
    def worker_pids(self) -> list[int]:
        """Worker processes in rank order."""
        ranked = sorted((process.cmdline()[-2], process.pid) for process in self.kin[1:])
        return [pid for _, pid in ranked]

    def front(self, name: str = "front-0") -> Front:
        front = Front(self, name)
        self.fronts.append(front)
        self.until(lambda: bool(front.welcomes), what="welcome")
        return front

    def until(self, true: Callable[[], bool], timeout_s: float = 20.0, what: str = "condition") -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}; reports {self.reports}"
            self.poller.wait(0.05)

    def wait_dead(self, timeout_s: float = 10.0) -> None:
        """The engine and all of its workers have gone."""
        self.until(lambda: self.child.is_dead, timeout_s, "death of the engine")
        _, alive = psutil.wait_procs(self.kin, timeout=5.0)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], alive

    def drain(self, order: Drain) -> None:
        self.child.drain(order.deadline_s, order.notice_s)

    def solo(self, row: Row) -> list[int]:
        model = json.loads(Path(self.config.model.model, "config.json").read_text())
        fake = msgspec.convert(model["fake"], FakeOptions)
        return expected_tokens(row.prompt, row.params, fake, row.params.max_tokens)

    def close(self) -> None:
        for front in self.fronts:
            front.close()
        if not self.child.is_dead:
            self.poller.remove(self.child)
        reap([self.child], 5.0)
        psutil.wait_procs(self.kin, timeout=5.0)
        assert not os.path.exists(self.run_dir.path) or self.run_dir.remove() is None

"""What a fault has to do with: one deployment of some shape, its processes by name, the truth about its blocks, and its streams.

Faults (tests/chaos/faults.py) act on a Site; judging them is tests/chaos/rounds.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import psutil

from scripts.deployment import Deployment, children, until
from scripts.streams import Answer, Body, undisturbed, with_stops
from trireme.transport.sockets.names import Connection, Poller
from trireme.transport.wire.messages import Call, CallReply, EngineToFront

QUIET_S = 10.0  # for all blocks to be back after the last stream has ended


class Site(AbstractContextManager["Site"]):
    """A running deployment with `bodies` and their undisturbed answers. `places` are directories that faults may fill."""

    def __init__(self, deployment: Deployment, places: dict[str, Path] | None = None) -> None:
        self.deployment = deployment
        self.places = places or {}
        self.bodies: list[Body] = []
        self.reference: list[Answer] = []
        self.usual_s = 0.0

    def __enter__(self) -> Site:
        self.deployment.__enter__()
        self._auditor = Auditor(self.deployment)
        return self

    def __exit__(self, *_: object) -> None:
        self._auditor.close()
        self.deployment.__exit__()

    def learn(self, bodies: list[Body]) -> None:
        """Asks for the undisturbed answers."""
        port = self.deployment.port
        self.bodies = with_stops(port, bodies)
        began = time.monotonic()
        self.reference = undisturbed(port, self.bodies)
        self.usual_s = (time.monotonic() - began) / 2
        self.until_quiet()
        self._num_processes = len(self.family())

    def pid(self, role: str, index: int = 0) -> int:
        """Of a worker: `index` counts those of the first engine."""
        if role == "worker":
            return children(self.deployment.pids("engine")[0])[index]
        return self.deployment.pids(role)[index]

    def family(self) -> list[int]:
        """All processes of the deployment."""
        parts = [pid for role in ("coordinator", "engine", "front") for pid in self.deployment.pids(role)]
        found = []
        for pid in parts:
            with contextlib.suppress(psutil.Error):
                found += [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
        return found

    def until_quiet(self) -> None:
        """All parts up, nothing owned by anybody, by the metrics and by an audit of every engine, and every request accounted
        for. Raises TimeoutError."""
        self.deployment.until_whole()
        until(lambda: self.deployment.owned_blocks() == 0.0, QUIET_S, "all blocks back")
        received, ended = self.deployment.books()
        if received != ended:
            raise TimeoutError(f"{received:g} requests were accepted, and {ended:g} have ended or are under way")
        for engine in range(self.deployment.config.parallel.dp):
            found = self._auditor.audit(engine)
            if found["num_owned"] or found["num_free"] + found["num_cached"] != found["num_blocks"]:
                raise TimeoutError(f"engine {engine} has not all of its blocks: {found}")

    def until_census(self) -> None:
        """As many processes as before, no more and no fewer. Raises TimeoutError."""
        until(lambda: len(self.family()) == self._num_processes, 5.0, f"{self._num_processes} processes in all")


class Auditor:
    """Asks engines for an audit of all their blocks and rows (which fails when any conservation law is broken)."""

    def __init__(self, deployment: Deployment) -> None:
        boot = deployment.supervisor.boot_for("admin", "auditor")
        numbers = range(deployment.config.parallel.dp)
        self._links = [Connection.open(boot, f"engine-{i}.front", EngineToFront) for i in numbers]
        self._poller = Poller()
        self._replies: dict[int, CallReply] = {}
        self._next_call = 0
        for link in self._links:
            self._poller.add(link, lambda link=link: self._on_messages(link))  # type: ignore[misc]

    def _on_messages(self, link: Connection) -> None:
        for message in link.receive():
            if isinstance(message, CallReply):
                self._replies[message.call_id] = message

    def audit(self, engine: int) -> dict[str, Any]:
        """Raises TimeoutError when the engine gives none within QUIET_S."""
        until, asked = time.monotonic() + QUIET_S, 0.0
        while time.monotonic() < until:
            if time.monotonic() - asked > 1.0:
                self._next_call += 1
                asked = time.monotonic() if self._links[engine].send(Call(self._next_call, "audit")) else 0.0
            self._poller.wait(0.02)
            reply = self._replies.pop(self._next_call, None)
            if reply is not None and reply.ok:
                return dict(reply.result)
        raise TimeoutError(f"engine {engine} gave no audit")

    def close(self) -> None:
        for link in self._links:
            self._poller.remove(link)
            link.close()


@dataclass
class Injury:
    """What was done, if it was. `parts` should be told dead; streams whose connection has one of `ports` may break. `breaches`:
    what else was wrong, as the one who did it saw."""

    parts: list[str] = field(default_factory=list)
    ports: set[int] = field(default_factory=set)
    is_done: bool = True
    what: str = ""
    breaches: list[str] = field(default_factory=list)


Inject: TypeAlias = Callable[[Site, Random], AbstractContextManager[Injury]]
"""Entering does the harm, leaving ends what does not last."""


def part_of(role: str, number: int) -> str:
    """Whose death is told: that of the engine, for a worker."""
    names = {"coordinator": "coordinator", "worker": "engine-0"}
    return names.get(role, f"{role}-{number}")


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def client_ports(pid: int) -> set[int]:
    """Ports of the clients that this process talks to."""
    with contextlib.suppress(psutil.Error):
        return {link.raddr.port for link in psutil.Process(pid).net_connections("tcp") if link.raddr}
    return set()


def kill(pid: int) -> set[int]:
    """SIGKILL; the ports of the clients that it was talking to then."""
    send(pid, signal.SIGSTOP)
    time.sleep(0.01)
    ports = client_ports(pid)
    send(pid, signal.SIGKILL)
    return ports


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)

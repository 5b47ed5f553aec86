"""A deployment for fault injection: a Supervisor in a thread of this process over the real parts, with unlimited restarts.

Used by scripts/kills.py and tests/chaos. Deaths are recorded with their times; processes are found by role and name.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trireme.launch.processes.events import Died, Event
from trireme.launch.processes.parts import Modules
from trireme.launch.processes.restarts import RestartLimits
from trireme.launch.processes.supervisor import Supervisor, SupervisorTimeouts
from trireme.resolve import prepare
from trireme.settings import load

PATIENT = RestartLimits(first_s=0.05, longest_s=0.05, most=None)  # the deployment is to survive any number of deaths
DEFAULTS = {"port": 0, "executor": "procs", "log_level": "error", "max_num_seqs": 32, "num_blocks": 1024}


class Deployment:
    """`settings` are those of trireme/config.py. `around` is entered in the supervisor's thread, for all of its lifetime."""

    def __init__(
        self,
        settings: dict[str, Any],
        *,
        modules: Modules | None = None,
        around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.died: list[tuple[float, Died]] = []  # with readings of time.monotonic
        self.config = prepare(load(DEFAULTS | settings).config).config
        self.supervisor = Supervisor(
            self.config, self._on_event, modules=modules, timing=SupervisorTimeouts(restarts=PATIENT)
        )
        self._around = around
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Deployment:
        self._thread.start()
        try:
            until(lambda: self.supervisor.is_ready or not self._thread.is_alive(), 120.0, "readiness")
            if not self._thread.is_alive():
                raise RuntimeError(f"the deployment did not start: {self.supervisor.failed}")
            self.until_whole()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(30.0)

    def _run(self) -> None:
        try:
            with self._around():
                self.supervisor.start()
                while not self.supervisor.is_finished and not self._stop:
                    self.supervisor.step(0.1)
        finally:
            self.supervisor.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Died):
            self.died.append((time.monotonic(), event))

    @property
    def port(self) -> int:
        assert self.supervisor.address is not None
        return self.supervisor.address[1]

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, str]:
        """GET from the HTTP port: (status, body). Raises OSError."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def model_name(self) -> str:
        return str(json.loads(self.get("/v1/models")[1])["data"][0]["id"])

    def pids(self, role: str) -> list[int]:
        """Pids of the living processes of one role; workers are children of engines, in the order of their numbers."""
        if role == "worker":
            return [child for pid in self.pids("engine") for child in children(pid)]
        born = [part.child for part in self.supervisor.parts if part.role == role]
        return [child.pid for child in born if child is not None]

    def until_whole(self, timeout_s: float = 60.0) -> float:
        """Waits until every part runs and every engine is up and makes progress; returns the seconds waited."""
        return until(self._is_whole, timeout_s, "all parts up")

    def _is_whole(self) -> bool:
        if not all(part.state == "ready" for part in self.supervisor.parts):
            return False
        with contextlib.suppress(OSError, http.client.HTTPException):
            return bool(json.loads(self.get("/ready")[1])["status"] == "ready")
        return False

    def owned_blocks(self) -> float:
        """KV blocks owned by sequences, plus running and waiting requests; 0 when idle."""
        lines = self.get("/metrics")[1].splitlines()
        rows = total_of(lines, "trireme_requests_running") + total_of(lines, "trireme_requests_waiting")
        return rows + total_of([line for line in lines if 'state="owned"' in line], "trireme_kv_blocks")

    def books(self) -> tuple[float, float]:
        """Accepted requests, and those that have ended or are in progress: equal, by the metrics of all frontends."""
        lines = self.get("/metrics")[1].splitlines()
        ended = total_of(lines, "trireme_requests_total") + total_of(lines, "trireme_streams_open")
        return total_of(lines, "trireme_requests_received_total"), ended


def total_of(lines: list[str], metric: str) -> float:
    """The sum of all samples of one metric. Raises LookupError when there is none."""
    found = [line for line in lines if line.startswith((metric + "{", metric + " "))]
    if not found:
        raise LookupError(f"there is no metric {metric}")
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def until(true: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Polls until `true()` holds; returns the seconds waited. Raises TimeoutError."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began

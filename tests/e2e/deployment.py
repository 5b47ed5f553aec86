"""A whole Trireme as a user starts it: `trireme serve` in a process of its own, watched from outside, always cleaned up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(true: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first truthy value of `true()`, or an AssertionError naming `what`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = true()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout_s} s: {what}")


def is_alive(pid: int) -> bool:
    """False for dead processes and zombies."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def born(pid: int) -> float:
    """When a process began; 0 when it is gone."""
    with contextlib.suppress(psutil.Error):
        return float(psutil.Process(pid).create_time())
    return 0.0


def is_spare(pid: int, line: str) -> bool:
    """Whether a process waits to become a part; one that has become it bears the part's name."""
    _, found, rest = line.partition(" spare-")
    with contextlib.suppress(OSError):
        return bool(found) and Path(f"/proc/{pid}/comm").read_text().strip() != rest.split()[0][:15]
    return False


def python_path() -> str:
    """The checkout, before what the environment names."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))


class Deployment:
    """`trireme serve MODEL FLAGS...` on a free port. Use as a context manager."""

    def __init__(self, model: str | Path, *flags: str, timeout_s: float = 90.0) -> None:
        self.model, self.flags, self.timeout_s = str(model), flags, timeout_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile()  # noqa: SIM115

    def launch(self) -> None:
        """Starts the process without waiting for readiness."""
        command = [
            sys.executable,
            "-m",
            "trireme.launch.cli",
            "serve",
            self.model,
            "--port",
            str(self.port),
            *self.flags,
        ]
        env = {**os.environ, "PYTHONPATH": python_path(), "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> Deployment:
        self.launch()
        try:
            self.wait_ready(self.timeout_s)
        except BaseException:
            self.stop(kill=True)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(kill=True)

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def wait_ready(self, timeout_s: float) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.output()}")
            # whichever front end answers: each connection may meet another one
            return "ready in" in self.output() and all(self.status("/ready") == 200 for _ in range(8))

        try:
            wait_for(ready, timeout_s, f"/ready of {self.model} {self.flags}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(self.url + path, timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return int(error.code)
        except OSError:
            return 0

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.loads(answer.read())

    def stream(
        self, body: dict[str, Any], *, rank: int | None = None, timeout_s: float = 60, path: str = "/v1/completions"
    ) -> Iterator[dict[str, Any]]:
        """Parsed SSE events; stops after [DONE] or an error. `rank` pins an engine. Closing the generator closes the connection.
        Raises ConnectionError for a stream that breaks off without either."""
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
        request = urllib.request.Request(self.url + path, json.dumps({**body, "stream": True}).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    if data == b"[DONE]":
                        return
                    event = json.loads(data)
                    yield event
                    if "error" in event:
                        return
        raise ConnectionError("the stream broke off")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of one metric whose labels match."""
        total, found = 0.0, False
        for line in self.get("/metrics").splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total, found = total + float(line.rsplit(" ", 1)[1]), True
        assert found, f"no metric {name} {labels}"
        return total

    def family(self) -> dict[int, str]:
        """Living descendants: pid -> command line."""
        found: dict[int, str] = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    found[child.pid] = " ".join(child.cmdline())
        return {pid: line for pid, line in found.items() if is_alive(pid)}

    def pids(self, module: str) -> list[int]:
        """Descendants that run `module` as a part of the deployment (spares wait to become one), oldest first."""
        found = [pid for pid, line in self.family().items() if module in line and not is_spare(pid, line)]
        return sorted(found, key=born)  # not by pid: the system begins again with low ones

    def stop(self, *, kill: bool = False, timeout_s: float = 20) -> int:
        """Ends the deployment: SIGTERM, or SIGKILL of the whole tree. Returns the exit status of the supervisor."""
        family = list(self.family())
        if self.process.poll() is None and not kill:
            self.process.send_signal(signal.SIGTERM)
        if kill:
            for pid in [self.process.pid, *family]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        status = self.process.wait(timeout_s)
        if kill:
            self.log.close()
        return status

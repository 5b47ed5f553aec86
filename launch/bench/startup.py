"""`trireme bench startup`: from process launch to the first served token, and the memory of the running processes.

Each run is a `trireme serve` process, as a user starts it. Its parts are those that it reports (launch/api/startup.py), and then
the first token.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from trireme.config import EngineConfig
from trireme.errors import EngineError
from trireme.launch.api.http import Endpoint, ServerError, first_model, stream
from trireme.launch.bench.samples import RunSummary, publish
from trireme.launch.options import Invocation
from trireme.phases import PART
from trireme.resolve import Prepared, prepare
from trireme.settings import to_yaml
from trireme.sizes import MIB

READY = "ready. "
LEAVE_S, CONNECT_S = 10.0, 30.0


class Memory(NamedTuple):
    """Bytes of a process tree: resident, and with shared pages counted once."""

    resident: int
    own: int


def run(invocation: Invocation) -> int:
    """Prints one result per start."""
    prepared = prepare(invocation.loaded.config)
    rows = []
    with tempfile.TemporaryDirectory(prefix="trireme-startup-") as folder:
        file = Path(folder) / "settings.yaml"
        file.write_text(to_yaml(_for_measuring(invocation.loaded.config)))
        for i in range(invocation.options["repeats"]):
            rows.append(RunSummary(f"run {i + 1}", _start_once(file, prepared, invocation.loaded.config), "startup"))
    publish(invocation, prepared.model.name, rows, prepared.config)
    return 0


def _for_measuring(config: EngineConfig) -> EngineConfig:
    """The requested settings, on a free port and without keys; readiness times are read from the log."""
    own = msgspec.structs.replace(config.serving, port=0, host="127.0.0.1", drain_notice=0.0)
    serving = msgspec.structs.replace(own, api_key=(), api_key_file=None, quotas=None)
    launch = msgspec.structs.replace(config.launch, log_level="info", log_format="json")
    return msgspec.structs.replace(config, serving=serving, launch=launch)


def _start_once(file: Path, prepared: Prepared, asked: EngineConfig) -> dict[str, float]:
    words = [sys.executable, "-m", "trireme.launch.cli", "serve", "--config", str(file)]
    words += ["--port", "0", "--log-level", "info", "--log-format", "json"]  # overrides the environment
    launched = time.monotonic()
    with _process(words) as (process, errors):
        stamps = _wait_ready(process, errors)
        model, port = prepared.config.model.served_name or "", int(stamps["port"])
        key = next(iter(asked.serving.api_key), "")  # a key may be in the environment, which the server reads as well
        asyncio.run(_first_token(Endpoint("127.0.0.1", port, False, "", key), model))
        served = time.monotonic()
        memory = tree_memory(process.pid)
    figures = phases_of(launched, stamps, served)
    weights = prepared.model.weight_bytes * prepared.config.parallel.dp
    figures["resident_mib"], figures["own_mib"] = memory.resident / MIB, memory.own / MIB
    figures["weights_mib"] = weights / MIB
    return figures


def phases_of(launched: float, stamps: dict[str, float], served: float) -> dict[str, float]:
    """Consecutive spans from launch to first token, in seconds; `total_s` is their sum."""
    found = {name.removeprefix(PART): seconds for name, seconds in stamps.items() if name.startswith(PART)}
    found["launcher"] = found.get("launcher", 0.0) + stamps["launched"] - launched  # (accurate to a hundredth only)
    fronts = max(at for name, at in stamps.items() if name.startswith("front-"))
    return {
        **{f"{name}_s": seconds for name, seconds in found.items()},
        "first_token_s": served - launched - sum(found.values()),
        "total_s": served - launched,
        "front_ready_s": fronts - launched,
    }


@contextmanager
def _process(words: list[str]) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A server whose stderr is read; terminated at the end, and killed if that does not work."""
    process = subprocess.Popen(
        words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    assert process.stderr is not None
    try:
        yield process, process.stderr
    finally:
        for sign in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            process.send_signal(sign)
            try:
                process.communicate(timeout=LEAVE_S)
                break
            except subprocess.TimeoutExpired:
                continue


def _wait_ready(process: subprocess.Popen[str], errors: IO[str]) -> dict[str, float]:
    """Reads the log up to the ready line. Raises EngineError with the last log lines of a server that ended."""
    last: list[str] = []
    for line in errors:
        last = [*last[-19:], line]
        if line.startswith("{"):
            entry = json.loads(line)
            if entry["process"] == "launch" and entry["message"].startswith(READY):
                pairs = (word.partition("=") for word in entry["message"].removeprefix(READY).split())
                return {name: float(value) for name, _, value in pairs}
    raise EngineError(f"the server ended with {process.wait()} before it was ready: {''.join(last).strip()[-800:]}")


async def _first_token(to: Endpoint, model: str) -> None:
    """Requests one token through the API, until the frontends have found their engines."""
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            await _one_token(to, model)
            return
        except ServerError as error:
            if error.status != 503 or time.monotonic() > until:
                raise
            await asyncio.sleep(0.005)


async def _one_token(to: Endpoint, model: str) -> None:
    if not model:
        model = await first_model(to)
    body = {"model": model, "prompt": "Hello, my name is", "max_tokens": 1, "temperature": 0, "stream": True}
    events = stream(to, "/v1/completions", body)
    try:
        async for _ in events:
            return
    finally:
        await events.aclose()


# ---------------------------------------------------------------- memory


def tree_memory(pid: int) -> Memory:
    """Memory of a process and its descendants, from /proc; processes that end meanwhile count as 0."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            words = _text(entry / "stat").rpartition(")")[2].split()
            parents[int(entry.name)] = int(words[1]) if words else 0
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    totals = [0, 0]
    for member in family:
        rows = dict(line.split(":", 1) for line in _text(Path(f"/proc/{member}/smaps_rollup")).splitlines()[1:])
        for i, key in enumerate(("Rss", "Pss")):
            totals[i] += int(rows.get(key, "0 kB").split()[0]) * 1024
    return Memory(*totals)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

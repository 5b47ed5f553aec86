"""A start: what it brings into memory (no torch beside a native stage, weights once), and what a terminal shows of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployment import ROOT, Deployment, free_port, python_path, wait_for
from tests.models.tiny import make_stub, make_tiny_llama
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.workers.cpu.kv_pages import SHARE

MIB = 1 << 20


def processes(deployment: Deployment) -> list[psutil.Process]:
    root = psutil.Process(deployment.process.pid)
    return [root, *root.children(recursive=True)]


def mapped_files(process: psutil.Process) -> set[str]:
    return {region.path for region in process.memory_maps()}


@pytest.mark.parametrize("flags", [(), ("--executor", "procs")], ids=["inproc", "procs"])
def test_no_process_loads_torch(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with Deployment(make_tiny_llama(tmp_path), "--served-name", "tiny", *flags) as served:
        served.post("/v1/completions", {"model": "tiny", "prompt": "the oars", "max_tokens": 4, "logprobs": 2})
        files = [mapped_files(process) for process in processes(served)]
        assert len(files) == 4 + len(flags) // 2  # launcher, its caretaker, frontend, engine; and the worker
        assert sum(any("models/_native" in path for path in paths) for paths in files) == 1, "one worker"
        assert not [path for paths in files for path in paths if "torch" in path]
        assert "native, no torch" in served.output()


def test_layers_that_are_shared_need_torch(tmp_path: Path) -> None:
    """The other runtime, so that the test above can fail."""
    with Deployment(make_tiny_llama(tmp_path), "--served-name", "tiny", "--tp", "2") as served:
        with_torch = [any("torch" in path for path in mapped_files(process)) for process in processes(served)]
        assert sum(with_torch) == 2, "the two workers"
        assert "2 workers share each layer" in served.output()


def test_the_packed_weights_are_the_only_copy() -> None:
    try:
        path = find_model("smollm2").path
    except ModelError as error:
        pytest.skip(str(error))
    with Deployment("smollm2", "--max-len", "512", "--kv-memory", "64MiB") as served:
        served.post("/v1/completions", {"prompt": "the oars", "max_tokens": 4})
        weights = path.stat().st_size
        assert not [process for process in processes(served) if str(path) in mapped_files(process)]
        own = sum(process.memory_full_info().uss for process in processes(served))
        assert own < weights + 64 * MIB // SHARE + 160 * MIB  # a share of the KV memory is resident from the start


def test_on_a_terminal_the_log_of_every_part_is_shown(tmp_path: Path) -> None:
    """The parts are started before there is a console; what they print still passes through it, above its bars."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "trireme.launch.cli", "serve", str(make_stub(tmp_path)), "--worker", "fake"]
    command += ["--port", str(free_port()), "--drain-notice", "0"]
    env = {**os.environ, "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": "200"}
    shown = bytearray()

    def read() -> None:
        try:
            while part := os.read(ours, 65536):
                shown.extend(part)
        except OSError:
            pass  # the other end is closed

    process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=theirs, start_new_session=True)
    os.close(theirs)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_for(lambda: b"ready in" in shown, 90, "the ready panel")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    reader.join(10)
    os.close(ours)
    for words in (
        b"engine-0     start",
        b"front-0      listening",
        b"engine-0     ready blocks=",
        b"front-0      drained",
    ):
        assert words in shown, shown.decode(errors="replace")

"""/ready tells the truth within 2 s, and what is stuck is ended and replaced while its streams go on. Real processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.deployment import Deployment, is_alive, wait_for
from tests.models.tiny import make_stub

pytestmark = pytest.mark.timeout(180)

HANG = ord("~")
TRUTH_S = 2.0
FLAGS = ("--served-name", "model", "--worker", "fake", "--executor", "procs")


def make_model(directory: Path, **fake: Any) -> Path:
    make_stub(directory)
    config = json.loads((directory / "config.json").read_text())
    config["stub"] = {"kind": "hash"}
    config["fake"] = {"delay_ms": 5.0, **fake}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Stream(threading.Thread):
    def __init__(self, deployment: Deployment, max_tokens: int, prompt: str = "go") -> None:
        super().__init__(daemon=True)
        self.deployment, self.text, self.end = deployment, "", ""
        self.body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        self.start()

    def run(self) -> None:
        try:
            for event in self.deployment.stream(self.body):
                if "error" in event:
                    self.end = event["error"]["code"]
                    return
                self.text += event["choices"][0]["text"]
            self.end = "done"
        except urllib.error.HTTPError as error:
            self.end = json.loads(error.read())["error"]["code"]
        except OSError as error:
            self.end = repr(error)


def whole(deployment: Deployment, max_tokens: int) -> str:
    stream = Stream(deployment, max_tokens)
    wait_for(lambda: stream.end, 60, "an undisturbed answer")
    return stream.text


def under_way(deployment: Deployment, max_tokens: int) -> list[Stream]:
    streams = [Stream(deployment, max_tokens) for _ in range(3)]
    wait_for(lambda: all(len(stream.text) > 20 for stream in streams), 20, "streams under way")
    return streams


def not_ready_within(deployment: Deployment, timeout_s: float) -> float:
    began = time.monotonic()
    wait_for(lambda: deployment.status("/ready") == 503, timeout_s, "/ready says that nothing goes on")
    return time.monotonic() - began


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_stopped_worker(tmp_path: Path, busy: bool) -> None:
    with Deployment(make_model(tmp_path / "m"), *FLAGS, "--tp", "2", "--step-timeout", "3") as deployment:
        before = whole(deployment, 400)
        streams = under_way(deployment, 400) if busy else []
        victim = deployment.pids("trireme.workers.main")[1]
        os.kill(victim, signal.SIGSTOP)
        not_ready_within(deployment, TRUTH_S)
        assert deployment.status("/live") == 200
        wait_for(lambda: not is_alive(victim), 5, "the stopped worker is ended")
        wait_for(lambda: deployment.status("/ready") == 200, 20, "its successor is ready")
        wait_for(lambda: all(stream.end for stream in streams), 30, "ends")
        assert {(stream.end, stream.text) for stream in streams} <= {("done", before)}
        assert whole(deployment, 400) == before
        assert deployment.metric("trireme_engine_epoch") == 1


def test_a_worker_that_hangs(tmp_path: Path) -> None:
    """Its process is well, as far as the system knows."""
    with Deployment(make_model(tmp_path / "m", hang_token=HANG), *FLAGS, "--step-timeout", "3") as deployment:
        before = whole(deployment, 400)
        streams = under_way(deployment, 400)
        hanging = Stream(deployment, 4, prompt="wait ~")
        not_ready_within(deployment, TRUTH_S)
        wait_for(lambda: hanging.end, 30, "an end for what hung two engines")
        assert hanging.end == "request_quarantined"
        wait_for(lambda: all(stream.end for stream in streams), 30, "ends")
        assert {(stream.end, stream.text) for stream in streams} == {("done", before)}
        wait_for(lambda: deployment.status("/ready") == 200, 20, "ready again")


def test_a_stopped_engine_is_replaced_and_never_heard_again(tmp_path: Path) -> None:
    """The supervisor ends it after its own 15 s. Another engine serves meanwhile, so the deployment stays ready."""
    with Deployment(make_model(tmp_path / "m"), *FLAGS, "--dp", "2") as deployment:
        before = whole(deployment, 400)
        victim = deployment.pids("trireme.engine_core.main")[0]
        streams = under_way(deployment, 400)
        os.kill(victim, signal.SIGSTOP)

        def says_stuck() -> bool:
            engines = json.loads(deployment.get("/ready"))["engines"]
            return any("not answered" in engine["stalled"] for engine in engines)

        wait_for(says_stuck, TRUTH_S, "/ready tells which engine does not answer")
        for _ in range(4):
            assert whole(deployment, 20) == before[:20]
        wait_for(lambda: not is_alive(victim), 20, "the stopped engine is ended")
        wait_for(lambda: all(stream.end for stream in streams), 60, "ends")
        assert {(stream.end, stream.text) for stream in streams} == {("done", before)}
        deployment.wait_ready(30)


def test_a_stopped_lone_engine(tmp_path: Path) -> None:
    with Deployment(make_model(tmp_path / "m"), *FLAGS) as deployment:
        engine = psutil.Process(deployment.pids("trireme.engine_core.main")[0])
        engine.suspend()
        not_ready_within(deployment, TRUTH_S)
        engine.resume()
        wait_for(lambda: deployment.status("/ready") == 200, TRUTH_S, "ready again")
        assert whole(deployment, 4)
        assert deployment.metric("trireme_engine_epoch") == 0


def test_a_long_honest_step_is_no_stall(tmp_path: Path) -> None:
    with Deployment(make_model(tmp_path / "m", delay_ms=2500.0), *FLAGS, "--step-timeout", "1") as deployment:
        stream = Stream(deployment, 4)
        while not stream.end:
            assert deployment.status("/ready") == 200
            time.sleep(0.05)
        assert stream.end == "done"
        assert deployment.metric("trireme_engine_epoch") == 0

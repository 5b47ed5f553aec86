"""Faults done to what a user starts: `trireme serve` with a real model, its own supervisor, and its own patience and back-off.

The rounds of tests/chaos/run.py restart at once and as often as they like, over a tiny model: what goes wrong only while a part is
away for seconds is seen here. `make chaos` and `make nightly` run it.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment, is_alive, wait_for
from tests.e2e.test_kills import differences, running_streams, undisturbed
from tests.e2e.test_starved import starving
from tests.procs.undying import undying

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_TOKENS = 150
FLAGS = ("--served-name", "tiny", "--max-len", "512", "--kv-memory", "64MiB", "--threads", "1", "--drain-notice", "2")
END_S = 120.0


def phase(deployment: Deployment, path: str = "/ready") -> str:
    """What one of the front ends says of the deployment; "" when none answers."""
    try:
        with urllib.request.urlopen(deployment.url + path, timeout=5) as answer:
            return str(json.loads(answer.read())["status"])
    except urllib.error.HTTPError as error:
        return str(json.loads(error.read())["status"])
    except OSError:
        return ""


def engine_of(deployment: Deployment, number: int) -> int:
    return next(
        pid for pid in deployment.pids("trireme.engine_core.main") if f"engine-{number}" in deployment.family()[pid]
    )


def test_an_engine_that_cannot_die_takes_nobody_along() -> None:
    with Deployment("smollm2", *FLAGS, "--dp", "2", "--api-servers", "2") as deployment:
        whole = undisturbed(deployment, NUM_TOKENS)
        streams = [*running_streams(deployment, 2, max_tokens=NUM_TOKENS, rank=0)]
        streams += running_streams(deployment, 2, max_tokens=NUM_TOKENS, rank=1)
        victim, front = engine_of(deployment, 0), deployment.pids("trireme.serving.main")[0]
        with undying(victim):
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: "engine-0 died" in deployment.output(), 40, "the supervisor gives it up")
            wait_for(lambda: all(stream.end for stream in streams), END_S, "the ends")
            assert not differences(streams, whole)
            os.kill(front, signal.SIGKILL)
            wait_for(lambda: "front-0 is back" in deployment.output(), 60, "others are started again meanwhile")
            wait_for(lambda: "engine-0 is back" in deployment.output(), 90, "its next life, beside it")
            wait_for(lambda: phase(deployment) == "ready", 30, "links to it")
            deployment.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            deployment.process.send_signal(signal.SIGTERM)
            assert deployment.process.wait(10) == 130
        assert "does not go" in deployment.output()


def test_a_front_end_that_comes_back_while_an_engine_loads() -> None:
    with Deployment("smollm2", *FLAGS, "--dp", "2", "--api-servers", "2") as deployment:
        os.kill(engine_of(deployment, 0), signal.SIGKILL)
        for pid in deployment.pids("trireme.serving.main"):
            os.kill(pid, signal.SIGKILL)
        seen: set[str] = set()
        until = time.monotonic() + 60
        while time.monotonic() < until and "ready" not in seen:
            seen |= {phase(deployment), phase(deployment, "/startup")}
            time.sleep(0.05)
        assert "ready" in seen
        assert seen <= {"", "ready", "degraded", "down"}


def test_an_engine_that_dies_in_the_drain_finishes_what_it_had() -> None:
    with Deployment("smollm2", *FLAGS) as deployment:
        whole = undisturbed(deployment, NUM_TOKENS)
        streams = running_streams(deployment, 3, max_tokens=NUM_TOKENS)
        deployment.process.send_signal(signal.SIGTERM)
        wait_for(lambda: phase(deployment) == "draining", 5, "the drain")
        os.kill(deployment.pids("trireme.engine_core.main")[0], signal.SIGKILL)
        streams += running_streams(deployment, 1, max_tokens=NUM_TOKENS)  # in the notice
        wait_for(lambda: all(stream.end for stream in streams), END_S, "the ends")
        assert [stream.end for stream in streams] == ["done"] * 4
        assert not differences(streams, whole)
        assert deployment.process.wait(20) == 0


def test_workers_without_a_processor_are_not_ended() -> None:
    with Deployment("smollm2", *FLAGS, "--tp", "2", "--step-timeout", "2") as deployment:
        whole = undisturbed(deployment, 12)
        with starving(deployment, deployment.pids("trireme.workers.main")):
            (stream,) = running_streams(deployment, 1, max_tokens=12)
            wait_for(lambda: stream.end, END_S, "its end")
        assert not differences([stream], whole)
        assert "died" not in deployment.output()


def test_nothing_is_left_of_a_killed_supervisor() -> None:
    with Deployment("smollm2", *FLAGS, "--dp", "2") as deployment:
        streams = running_streams(deployment, 2, max_tokens=NUM_TOKENS)
        family = list(deployment.family())
        run_dir = Path(deployment.output().partition("trireme.Client('")[2].partition("'")[0])
        assert run_dir.is_dir()
        deployment.process.kill()
        wait_for(lambda: not any(is_alive(pid) for pid in family), 5, "no process is left")
        wait_for(lambda: not run_dir.exists(), 5, "no directory is left")
        wait_for(lambda: all(stream.end for stream in streams), 5, "streams break off")

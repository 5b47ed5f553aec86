"""A pause outlives the engines it holds: kill -9 of a paused one, and its next life steps only after `/resume`."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.procs.fake_llm import fake_model

pytestmark = pytest.mark.timeout(120)

FLAGS = ("--worker", "fake", "--max-len", "1024", "--num-blocks", "512", "--admin-key", "boss", "--served-name", "tiny")
MOVES = ("--migration-limit", "10")  # of kept rows, with every death
BODY = {"model": "tiny", "prompt": "stream", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Paused:
    """A deployment whose worker takes 10 ms a step, and its admin."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    def ask(self, method: str, path: str) -> Any:
        headers = {"authorization": "Bearer boss"}
        request = urllib.request.Request(self.deployment.url + path, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def pauses(self) -> list[str]:
        return [engine["pause"] for engine in self.ask("GET", "/is_paused")["engines"]]

    def epochs(self) -> list[int]:
        ready = urllib.request.Request(self.deployment.url + "/ready")
        try:
            with urllib.request.urlopen(ready, timeout=10) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            found = json.loads(error.read())
        return [engine["epoch"] if engine["up"] else -1 for engine in found["engines"]]

    def kill_engine(self) -> int:
        """The oldest one."""
        pid = self.deployment.pids("trireme.engine_core.main")[0]
        os.kill(pid, signal.SIGKILL)
        return pid

    def num_steps(self) -> float:
        return self.deployment.metric("trireme_engine_steps_total")


class Reader(threading.Thread):
    def __init__(self, deployment: Deployment) -> None:
        super().__init__(daemon=True)
        self.deployment, self.text, self.error = deployment, "", None
        self.start()

    def run(self) -> None:
        for event in self.deployment.stream(BODY):
            self.error = event.get("error")
            self.text += event["choices"][0]["text"] if "choices" in event else ""


@pytest.mark.parametrize(("mode", "dp"), [("keep", 2), ("keep", 1), ("wait", 2), ("abort", 1)])
def test_the_next_life_of_a_paused_engine_is_paused(tmp_path: Path, mode: str, dp: int) -> None:
    with Deployment(fake_model(tmp_path, delay_ms=10), *FLAGS, *MOVES, "--dp", str(dp)) as deployment:
        boss = Paused(deployment)
        whole = deployment.post("/v1/completions", BODY)["choices"][0]["text"]
        readers = [Reader(deployment) for _ in range(4)]
        wait_for(lambda: all(reader.text for reader in readers), 20, "all streams have begun")
        assert boss.ask("POST", f"/pause?mode={mode}")["is_paused"]
        for reader in readers if mode != "keep" else ():
            reader.join(10)
            assert (reader.text == whole) == (mode == "wait")
        for life in (1, 2):  # of each engine
            for _ in range(dp):
                before = boss.epochs()
                boss.kill_engine()
                wait_for(
                    lambda then=before: sum(boss.epochs()) == sum(then) + 1 and -1 not in boss.epochs(), 30, "back"
                )
            assert boss.epochs() == [life] * dp
            assert boss.pauses() == [mode] * dp
        late = Reader(deployment)
        num_steps = boss.num_steps()
        late.join(1.0)
        assert (late.is_alive(), late.text, boss.num_steps()) == (True, "", num_steps)
        assert boss.ask("POST", "/resume")["is_paused"] is False
        for reader in [late, *readers]:
            reader.join(30)
        assert late.text == whole
        if mode == "keep":
            assert [(reader.error, reader.text) for reader in readers] == [(None, whole)] * 4
        boss.kill_engine()
        wait_for(lambda: -1 not in boss.epochs() and max(boss.epochs()) == 3, 30, "back")
        assert boss.pauses() == [""] * dp


@pytest.mark.parametrize(("mode", "dp"), [("keep", 1), ("wait", 2), ("abort", 2)])
def test_a_resume_finds_an_engine_that_is_down(tmp_path: Path, mode: str, dp: int) -> None:
    """It is answered when that engine's next life goes on too."""
    with Deployment(fake_model(tmp_path, delay_ms=10), *FLAGS, *MOVES, "--dp", str(dp)) as deployment:
        boss = Paused(deployment)
        whole = deployment.post("/v1/completions", BODY)["choices"][0]["text"]
        boss.ask("POST", f"/pause?mode={mode}")
        late = [Reader(deployment) for _ in range(4)]
        late[0].join(0.2)
        boss.kill_engine()
        wait_for(lambda: -1 in boss.epochs(), 5, "it is down")
        assert boss.ask("POST", "/resume")["engines"] == [
            {"engine": engine, "state": "awake", "sleep_level": 0, "pause": ""} for engine in range(dp)
        ]
        assert sorted(boss.epochs()) == [*[0] * (dp - 1), 1]
        for reader in late:
            reader.join(20)
            assert (reader.text, reader.error) == (whole, None)

"""Choice of engines by a whole deployment: talks stay where their prefix is cached, places and weights are obeyed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama

pytestmark = pytest.mark.timeout(180)
BLOCK = 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


class Talk:
    """Turns of one session: each prompt is the one before, its answer, and more. A character is a token."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = f"{number} " * 60
        self.num_known = 0  # tokens whose KV some engine has

    def turn(self, deployment: Deployment) -> tuple[int, int]:
        """(cached tokens, tokens that could be) of the next turn."""
        self.text += f"turn of {self.number}. "
        body = {"model": "tiny", "prompt": self.text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        usage = deployment.post("/v1/completions", body)["usage"]
        reachable = min(self.num_known, usage["prompt_tokens"] - 1) // BLOCK * BLOCK
        self.num_known = usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"], reachable


def share_of_hits(deployment: Deployment, talks: list[Talk], turns: int) -> float:
    found = [talk.turn(deployment) for _ in range(turns) for talk in talks]
    return sum(hit for hit, _ in found) / sum(reachable for _, reachable in found)


def test_talks_stay_where_their_prefix_is_also_after_the_coordinators_death(tiny: Path) -> None:
    flags = ["--served-name", "tiny", "--dp", "3", "--threads", "1", "--balance", "prefix"]
    with Deployment(tiny, *flags) as deployment:
        talks = [Talk(number) for number in range(10, 20)]
        assert [talk.turn(deployment) for talk in talks] == [(0, 0)] * len(talks)
        assert share_of_hits(deployment, talks, 3) >= 0.95
        assert all(deployment.metric("trireme_prefix_queries_total", engine=str(e)) > 0 for e in range(3))
        (old,) = deployment.pids("trireme.coordinator.main")
        os.kill(old, signal.SIGKILL)
        wait_for(
            lambda: [p for p in deployment.pids("trireme.coordinator.main") if p != old], 5, "the coordinator restarted"
        )

        def is_asked() -> bool:
            before = deployment.metric("trireme_routing_fallbacks_total")
            Talk(99).turn(deployment)
            return deployment.metric("trireme_routing_fallbacks_total") == before

        wait_for(is_asked, 10, "the coordinator is asked again")
        assert share_of_hits(deployment, talks, 3) >= 0.95


def test_places_and_weights_are_obeyed(tiny: Path) -> None:
    flags = ["--served-name", "tiny", "--dp", "3", "--threads", "1", "--balance", "round_robin"]
    flags += ["--engine-weights", "3,1,1", "--engine-labels", "a,a,b", "--front-labels", "a"]

    def steps(deployment: Deployment) -> list[float]:
        return [deployment.metric("trireme_engine_steps_total", engine=str(engine)) for engine in range(3)]

    with Deployment(tiny, *flags) as deployment:
        body: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 1, "temperature": 0}
        for _ in range(16):
            deployment.post("/v1/completions", body)
        assert steps(deployment) == [12.0, 4.0, 0.0]


class Crowd:
    """Streams that are all sent to the first of two engines, by its weight, when it runs two rows at a time."""

    FLAGS = ("--served-name", "tiny", "--dp", "2", "--threads", "1", "--max-num-seqs", "2", "--balance", "round_robin")
    FLAGS += ("--engine-weights", "1000,0.001", "--max-waiting", "64")

    def __init__(self, deployment: Deployment, count: int, max_tokens: int) -> None:
        self.deployment = deployment
        self.bodies = [
            {"model": "tiny", "prompt": f"row {i}", "seed": i, "max_tokens": max_tokens, "ignore_eos": True}
            for i in range(count)
        ]
        self.pool = ThreadPoolExecutor(count)
        self.answers = [self.pool.submit(self.ask, body) for body in self.bodies]

    def ask(self, body: dict[str, Any]) -> str:
        return str(self.deployment.post("/v1/completions", body, timeout_s=60)["choices"][0]["text"])

    def check(self) -> None:
        """Everybody got what they get alone."""
        found = [answer.result(60) for answer in self.answers]
        assert found == [self.ask(body) for body in self.bodies]


def test_an_idle_engine_takes_rows_that_wait_at_another(tiny: Path) -> None:
    with Deployment(tiny, *Crowd.FLAGS) as deployment:
        Crowd(deployment, 16, 400).check()  # long enough for engines without a processor to tell what they have
        stolen = deployment.metric("trireme_rows_given_back_total", engine="0")
        assert 2 <= stolen <= 16
        assert deployment.metric("trireme_engine_steps_total", engine="1") >= 100
        assert deployment.metric("trireme_requests_total", outcome="complete") == 32


def test_without_stealing_they_stay(tiny: Path) -> None:
    with Deployment(tiny, *Crowd.FLAGS, "--no-work-stealing") as deployment:
        Crowd(deployment, 8, 60).check()
        assert deployment.metric("trireme_engine_steps_total", engine="1") == 0


@pytest.mark.parametrize("victim", ["thief", "loaded", "coordinator"])
def test_death_amid_stealing_loses_and_repeats_nothing(tiny: Path, victim: str) -> None:
    with Deployment(tiny, *Crowd.FLAGS) as deployment:
        crowd = Crowd(deployment, 16, 150)
        wait_for(lambda: deployment.metric("trireme_rows_given_back_total", engine="0") > 0, 20, "something stolen")
        module = "trireme.coordinator.main" if victim == "coordinator" else "trireme.engine_core.main"
        os.kill(deployment.pids(module)[1 if victim == "thief" else 0], signal.SIGKILL)
        crowd.check()
        assert deployment.metric("trireme_requests_total", outcome="error") == 0


def two_ports() -> int:
    """The first of two free ports in a row, below those that the system gives away."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", first))
            other.bind(("127.0.0.1", first + 1))
            return first
    raise AssertionError("no two free ports in a row")


def progress(deployment: Deployment) -> int:
    return int(json.loads(deployment.get("/load"))["engines"][0]["progress"])


def test_something_outside_balances_over_ports_of_one_engine_each(tiny: Path) -> None:
    flags = (
        "--served-name",
        "tiny",
        "--dp",
        "2",
        "--threads",
        "1",
        "--api-servers",
        "2",
        "--load-balancing",
        "external",
    )
    deployment = Deployment(tiny, *flags)
    deployment.port = two_ports()
    deployment.url = f"http://127.0.0.1:{deployment.port}"
    with deployment:
        ports = [deployment.url, f"http://127.0.0.1:{deployment.port + 1}"]
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        texts = []
        for engine, url in enumerate(ports):
            deployment.url = url
            texts += [deployment.post("/v1/completions", body)["choices"][0]["text"] for _ in range(3)]
            assert deployment.metric("trireme_engine_steps_total", engine=str(engine)) == 12
            assert deployment.metric("trireme_engine_up") == 1
            assert deployment.metric("trireme_requests_total", outcome="complete") == 3
            load = json.loads(deployment.get("/load"))
            assert [(entry["engine"], entry["state"]) for entry in load["engines"]] == [(engine, "ready")]
            assert load["status"] == "ready"
            wait_for(lambda: progress(deployment) >= 12, 1, "the load is that of now")
            assert next(deployment.stream(body, rank=engine))["choices"]
            with pytest.raises(urllib.error.HTTPError, match="404"):
                next(deployment.stream(body, rank=1 - engine))
        assert len(set(texts)) == 1

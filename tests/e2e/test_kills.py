"""kill -9 of every kind of process, mid-stream: no orphan, no token lost or repeated, others unaffected, it all comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment, is_alive, wait_for
from tests.models.tiny import make_tiny_llama

pytestmark = pytest.mark.timeout(180)
PATIENT = ("--stream-buffer", str(64 << 20))  # a reader that gets no processor is not cut off


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that an engine, not the reader of its streams, sets the pace: a step takes milliseconds, so that streams are
    under way when a process is killed, on a fast machine and on a busy one."""
    wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192, num_key_value_heads=4, **wide)


class Stream(threading.Thread):
    """One streamed completion; `end` is "done", the error event's object, or the exception that broke it."""

    def __init__(self, deployment: Deployment, *, max_tokens: int, rank: int | None = None) -> None:
        super().__init__(daemon=True)
        self.deployment, self.rank = deployment, rank
        self.body = {
            "model": "tiny",
            "prompt": "stream",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.num_tokens = 0
        self.text = ""
        self.end: Any = None

    def run(self) -> None:
        try:
            for event in self.deployment.stream(self.body, rank=self.rank, timeout_s=30):
                if "error" in event:
                    self.end = event["error"]
                    return
                self.num_tokens += 1
                self.text += event["choices"][0]["text"]
            self.end = "done"
        except Exception as error:
            self.end = error


def running_streams(deployment: Deployment, count: int, **kw: Any) -> list[Stream]:
    streams = [Stream(deployment, **kw) for _ in range(count)]
    for stream in streams:
        stream.start()
    wait_for(lambda: all(s.num_tokens > 3 or s.end for s in streams), 20, "streams under way")
    assert all(s.end is None for s in streams), [s.end for s in streams]
    return streams


def one_answer(deployment: Deployment) -> str:
    body = {"model": "tiny", "prompt": "after", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return str(deployment.post("/v1/completions", body)["choices"][0]["text"])


def undisturbed(deployment: Deployment, max_tokens: int) -> str:
    stream = Stream(deployment, max_tokens=max_tokens)
    stream.start()
    stream.join(60)
    assert stream.end == "done", stream.end
    return stream.text


def differences(streams: list[Stream], whole: str) -> list[tuple[int, str, str]]:
    """Of those whose text is another: where it begins to differ, what they say there and what they should."""
    found = []
    for stream in streams:
        pairs = zip(stream.text, whole, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(stream.text), len(whole)))
        if stream.text != whole:
            found.append((at, stream.text[at : at + 40], whole[at : at + 40]))
    return found


def test_a_killed_engines_streams_go_on(tiny: Path) -> None:
    with Deployment(tiny, "--served-name", "tiny", "--dp", "2", "--max-len", "8192", *PATIENT) as deployment:
        whole = undisturbed(deployment, 800)
        moved = running_streams(deployment, 2, max_tokens=800, rank=0)
        kept = running_streams(deployment, 2, max_tokens=800, rank=1)
        engines = deployment.pids("trireme.engine_core.main")
        assert len(engines) == 2
        os.kill(engines[0], signal.SIGKILL)
        assert one_answer(deployment)
        wait_for(lambda: all(s.end for s in moved + kept), 60, "ends of all streams")
        assert [s.end for s in moved + kept] == ["done"] * 4
        assert differences(moved + kept, whole) == []
        assert deployment.metric("trireme_moves_total") in (
            2,
            3,
        )  # the answer in between may have begun on the killed engine
        wait_for(lambda: len(deployment.pids("trireme.engine_core.main")) == 2, 30, "the engine restarted")
        deployment.wait_ready(30)
        again = Stream(deployment, max_tokens=20, rank=0)
        again.start()
        again.join(20)
        assert again.end == "done"


def test_a_killed_workers_streams_wait_for_the_next_life(tiny: Path) -> None:
    with Deployment(tiny, "--served-name", "tiny", "--tp", "2", "--max-len", "8192") as deployment:
        whole = undisturbed(deployment, 250)
        streams = running_streams(deployment, 2, max_tokens=250)
        workers = deployment.pids("trireme.workers.main")
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        wait_for(lambda: not is_alive(workers[0]), 5, "the other worker gone")
        late = running_streams(deployment, 1, max_tokens=250)  # accepted while no engine is up
        wait_for(lambda: all(s.end for s in streams + late), 60, "ends of all streams")
        assert [s.end for s in streams + late] == ["done"] * 3
        assert differences(streams + late, whole) == []
        assert len(deployment.pids("trireme.workers.main")) == 2


def test_a_killed_coordinator_is_not_noticed_and_soon_back(tiny: Path) -> None:
    with Deployment(tiny, "--served-name", "tiny", "--dp", "2", "--max-len", "8192", *PATIENT) as deployment:
        before = one_answer(deployment)
        streams = running_streams(deployment, 4, max_tokens=1200)
        for _ in range(3):
            (old,) = deployment.pids("trireme.coordinator.main")
            os.kill(old, signal.SIGKILL)
            for _ in range(3):
                assert one_answer(deployment) == before
            wait_for(
                lambda old=old: [p for p in deployment.pids("trireme.coordinator.main") if p != old], 2, "its next life"
            )
        wait_for(lambda: all(s.end for s in streams), 60, "streams")
        assert [s.end for s in streams] == ["done"] * 4

        def is_routing() -> bool:
            """The front end asks it again, which it can answer once the engines have reported."""
            fallbacks = deployment.metric("trireme_routing_fallbacks_total")
            one_answer(deployment)
            return deployment.metric("trireme_routing_fallbacks_total") == fallbacks

        wait_for(is_routing, 2, "routing by the coordinator")


def test_front_end_killed_frees_its_rows(tiny: Path) -> None:
    with Deployment(tiny, "--served-name", "tiny", "--api-servers", "2", "--max-len", "8192") as deployment:
        before = one_answer(deployment)
        streams = running_streams(deployment, 6, max_tokens=4000)
        fronts = deployment.pids("trireme.serving.main")
        assert len(fronts) == 2
        for pid in fronts:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: all(s.end for s in streams), 5, "connections closed")
        wait_for(lambda: len(deployment.pids("trireme.serving.main")) == 2, 30, "front ends restarted")
        deployment.wait_ready(30)
        wait_for(lambda: deployment.metric("trireme_requests_running") == 0, 5, "rows freed")
        assert deployment.metric("trireme_requests_waiting") == 0
        assert deployment.metric("trireme_kv_blocks", state="owned") == 0
        assert one_answer(deployment) == before


@pytest.mark.parametrize("moment", ["idle", "mid-stream", "loading"])
def test_no_orphans_when_the_supervisor_is_killed(tiny: Path, moment: str) -> None:
    """O24: nothing outlives a SIGKILL of the parent; a new start on the same port works."""
    flags = ("--served-name", "tiny", "--dp", "2", "--tp", "2", "--max-len", "8192")
    deployment = Deployment(tiny, *flags)
    if moment == "loading":
        deployment.launch()
        wait_for(lambda: deployment.pids("trireme.engine_core.main"), 20, "engines starting")
    else:
        deployment.__enter__()
        if moment == "mid-stream":
            running_streams(deployment, 2, max_tokens=4000)
    family = deployment.family()
    assert family
    shm_before = set(os.listdir("/dev/shm"))
    os.kill(deployment.process.pid, signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in family), 5, "no descendant alive")
    deployment.process.wait(5)
    assert set(os.listdir("/dev/shm")) <= shm_before
    deployment.stop(kill=True)
    again = Deployment(tiny, "--served-name", "tiny")
    again.port, again.url = deployment.port, deployment.url
    with again:
        assert one_answer(again)


def test_sigterm_finishes_streams_and_refuses_new_ones(tiny: Path) -> None:
    flags = ("--served-name", "tiny", "--max-len", "8192", "--drain-notice", "0", "--drain-timeout", "30")
    with Deployment(tiny, *flags) as deployment:
        streams = running_streams(deployment, 3, max_tokens=800)
        family = deployment.family()
        deployment.process.send_signal(signal.SIGTERM)
        wait_for(lambda: deployment.status("/ready") == 503, 2, "not ready while draining")
        wait_for(lambda: all(s.end for s in streams), 30, "streams finished")
        assert [s.end for s in streams] == ["done"] * 3
        assert deployment.process.wait(15) == 0
        wait_for(lambda: not any(is_alive(pid) for pid in family), 5, "no descendant alive")


def test_second_interrupt_ends_at_once(tiny: Path) -> None:
    with Deployment(tiny, "--served-name", "tiny", "--max-len", "8192") as deployment:
        running_streams(deployment, 1, max_tokens=800)
        family = deployment.family()
        deployment.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        deployment.process.send_signal(signal.SIGINT)
        deployment.process.wait(5)
        wait_for(lambda: not any(is_alive(pid) for pid in family), 5, "no descendant alive")

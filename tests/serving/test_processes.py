"""Real front end processes under a real supervisor: several of them, deaths of engines and of front ends, draining."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_stub
from tests.procs.deployment import Supervised, wait_for
from trireme.config import EngineConfig, ModelConfig, ParallelConfig, ServingConfig
from trireme.launch.processes.events import Event
from trireme.launch.processes.parts import Modules
from trireme.launch.processes.supervisor import Supervisor

BODY = {"model": "model", "prompt": "hello", "stream": True}


class Running(Supervised):
    """Front ends with scripted engines."""

    up_s = 30.0

    def __init__(
        self,
        directory: Path,
        *,
        dp: int = 1,
        fronts: int = 1,
        delay_ms: float = 2.0,
        notice_s: float = 0.3,
        drain_s: float = 10.0,
    ) -> None:
        self.model = model = make_stub(directory / "model", delay_ms=delay_ms)
        config = EngineConfig(
            model=ModelConfig(model=str(model)),
            parallel=ParallelConfig(dp=dp),
            serving=ServingConfig(port=0, api_servers=fronts, drain_timeout=drain_s, drain_notice=notice_s),
        )
        self.events: list[Event] = []
        super().__init__(Supervisor(config, self.events.append, modules=Modules(engine="tests.serving.engine_process")))

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def is_up(self) -> bool:
        return self.get("/ready")[0] == 200


class OpenStream(threading.Thread):
    """One stream; `events` grows, `end` is "done", an error object, or what broke it."""

    def __init__(self, running: Running, max_tokens: int, rank: int | None = None, *, wait: bool = True) -> None:
        super().__init__(daemon=True)
        self.events: list[Any] = []
        self.end: Any = None
        body = json.dumps({**BODY, "max_tokens": max_tokens}).encode()
        headers = {"Content-Type": "application/json"} | (
            {"X-data-parallel-rank": str(rank)} if rank is not None else {}
        )
        self._request = urllib.request.Request(f"http://127.0.0.1:{running.port}/v1/completions", body, headers)
        self.start()
        if wait:
            wait_for(lambda: len(self.events) > 2 or self.end, 10, "a stream under way")

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=30) as answer:
                for line in answer:
                    if line.startswith(b"data: [DONE]"):
                        self.end = "done"
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.end = event["error"]
                        else:
                            self.events.append(event)
        except urllib.error.HTTPError as error:
            self.end = json.loads(error.read())["error"]
        except Exception as error:
            self.end = error
        self.end = self.end or "closed"

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events)


def samples(running: Running) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in running.get("/metrics")[1].splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in lines}


@pytest.fixture
def two_fronts(tmp_path: Path) -> Iterator[Running]:
    with Running(tmp_path, fronts=2) as running:
        yield running


def test_ready_shows_how_far_the_engines_are(tmp_path: Path) -> None:
    with Running(tmp_path, fronts=1) as running:
        seen: list[dict[str, Any]] = []
        os.kill(running.part("engine-0").child.pid, signal.SIGKILL)
        end = time.monotonic() + 15
        part = running.part("engine-0")
        while time.monotonic() < end and (part.epoch, part.state) != (1, "ready"):
            status, body = running.get("/ready")
            seen += json.loads(body).get("progress", []) if status == 503 else []
            time.sleep(0.02)
        assert {"source": "engine-0", "phase": "weights", "done": 2, "total": 4} in seen
        wait_for(lambda: running.get("/ready")[0] == 200, 5, "ready again")


def test_any_front_end_tells_the_numbers_of_all(two_fronts: Running) -> None:
    streams = [OpenStream(two_fronts, 5) for _ in range(12)]
    wait_for(lambda: all(stream.end for stream in streams), 10, "the ends")
    assert {stream.text for stream in streams} == {"abcde"}
    for _ in range(6):
        found = samples(two_fronts)
        assert found['trireme_requests_total{outcome="complete"}'] == 12
        assert found["trireme_generation_tokens_total"] == 60
        assert found['trireme_requests_running{engine="0"}'] == 0


def test_a_front_end_killed_touches_only_its_own(two_fronts: Running) -> None:
    streams = [OpenStream(two_fronts, 2500) for _ in range(8)]
    os.kill(two_fronts.part("front-0").child.pid, signal.SIGKILL)
    wait_for(
        lambda: two_fronts.part("front-0").epoch == 1 and two_fronts.part("front-0").state == "ready", 15, "the restart"
    )
    broken = [stream for stream in streams if stream.end is not None]
    alive = [stream for stream in streams if stream.end is None]
    assert all(isinstance(stream.end, Exception) or stream.end == "closed" for stream in broken)
    wait_for(lambda: samples(two_fronts)['trireme_requests_running{engine="0"}'] == len(alive), 5, "freed rows")
    assert all(OpenStream(two_fronts, 3).text for _ in range(4))


def test_an_engine_killed_touches_only_its_own(tmp_path: Path) -> None:
    with Running(tmp_path, dp=2, delay_ms=5) as running:
        lost = [OpenStream(running, 300, rank=0) for _ in range(2)]
        kept = [OpenStream(running, 300, rank=1) for _ in range(2)]
        free = [OpenStream(running, 3) for _ in range(6)]
        wait_for(lambda: all(stream.end == "done" for stream in free), 5, "unpinned streams")
        os.kill(running.part("engine-0").child.pid, signal.SIGKILL)
        assert running.get("/ready")[0] == 200  # the other one answers
        assert OpenStream(running, 3).text == "abc"
        wait_for(
            lambda: samples(running).get('trireme_engine_epoch{engine="0"}') == 1, 20, "the next life of the engine"
        )
        assert OpenStream(running, 3, rank=0).text == "abc"
        wait_for(lambda: all(stream.end for stream in (*kept, *lost)), 60, "all streams")
        assert [stream.end for stream in (*kept, *lost)] == [
            "done"
        ] * 4  # what the engine lost went on with the other one
        assert [stream.events[-1]["choices"][0]["finish_reason"] for stream in lost] == ["length"] * 2
        found = samples(running)
        assert found["trireme_moves_total"] >= 2
        assert (
            'trireme_requests_total{outcome="error"}' not in found
            or found['trireme_requests_total{outcome="error"}'] == 0
        )


def test_a_front_end_that_comes_back_while_an_engine_is_down_is_ready(tmp_path: Path) -> None:
    """The deployment is not loading: the other engine answers, and probes must say so."""
    with Running(tmp_path, dp=2) as running:
        engine, front = running.part("engine-0"), running.part("front-0")
        (running.model / "engine-0.hang").touch()  # its next life does not become ready
        os.kill(engine.child.pid, signal.SIGKILL)
        wait_for(lambda: (engine.epoch, engine.state) == (1, "starting"), 15, "the engine starts again")
        os.kill(front.child.pid, signal.SIGKILL)
        wait_for(lambda: (front.epoch, front.state) == (1, "ready"), 15, "the front end is back")
        assert OpenStream(running, 3).text == "abc"
        status, body = running.get("/ready")
        assert (status, json.loads(body)["status"]) == (200, "degraded")
        assert running.get("/startup") == (200, '{"status":"degraded"}')
        os.kill(running.part("engine-1").child.pid, signal.SIGKILL)
        wait_for(lambda: json.loads(running.get("/ready")[1])["status"] == "down", 5, "nothing is up")
        assert running.get("/startup")[0] == 200


def test_routing_survives_the_coordinator(tmp_path: Path) -> None:
    with Running(tmp_path, dp=2) as running:
        stream = OpenStream(running, 400)
        os.kill(running.part("coordinator").child.pid, signal.SIGKILL)
        assert [OpenStream(running, 3).text for _ in range(6)] == ["abc"] * 6
        wait_for(lambda: running.part("coordinator").epoch == 1, 10, "the restart")
        assert OpenStream(running, 3).text == "abc"
        wait_for(lambda: stream.end, 10, "the stream")
        assert stream.end == "done"
        assert len(stream.text) == 400


def test_draining_loses_nothing(tmp_path: Path) -> None:
    with Running(tmp_path, fronts=2) as running:
        streams = [OpenStream(running, 500) for _ in range(6)]
        port = running.port
        running.supervisor.request_stop("test", 0.3)
        wait_for(lambda: running.get("/ready")[0] == 503, 2, "not ready")
        late = OpenStream(running, 3)
        assert late.text == "abc"
        wait_for(lambda: all(stream.end for stream in streams), 15, "the ends")
        assert [stream.end for stream in streams] == ["done"] * 6
        wait_for(lambda: running.supervisor.is_finished, 10, "the end of the supervisor")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            pytest.fail("somebody still listens")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_engine_that_dies_around_the_stop_finishes_its_streams_in_its_next_life(tmp_path: Path, moment: str) -> None:
    """Also what comes in the notice, while no engine is up."""
    with Running(tmp_path, delay_ms=5, notice_s=3.0) as running:
        streams = [OpenStream(running, 300) for _ in range(2)]
        engine = running.part("engine-0")
        if moment == "after":
            running.supervisor.request_stop("test", 3.0)
            wait_for(lambda: '"draining"' in running.get("/ready")[1], 5, "the drain")
        os.kill(engine.child.pid, signal.SIGKILL)
        wait_for(lambda: engine.state == "waiting", 5, "the death")
        if moment == "before":
            running.supervisor.request_stop("test", 3.0)
            wait_for(lambda: '"draining"' in running.get("/ready")[1], 5, "the drain")
        late = OpenStream(running, 5, wait=False)
        wait_for(lambda: all(stream.end for stream in (*streams, late)), 20, "the ends")
        assert [stream.end for stream in (*streams, late)] == ["done"] * 3
        assert [len(stream.text) for stream in (*streams, late)] == [300, 300, 5]
        wait_for(lambda: running.supervisor.is_finished, 10, "the end")
        assert (engine.epoch, running.supervisor.exit_code) == (1, 0)


def test_what_no_engine_can_finish_before_the_drain_deadline_ends_at_once(tmp_path: Path) -> None:
    with Running(tmp_path, delay_ms=5, notice_s=3.0) as running:
        engine = running.part("engine-0")
        engine.start_s = 60.0  # its starts take longer than the drain
        stream = OpenStream(running, 2000)
        running.supervisor.request_stop("test", 3.0)
        wait_for(lambda: '"draining"' in running.get("/ready")[1], 5, "the drain")
        os.kill(engine.child.pid, signal.SIGKILL)
        took_s = wait_for(lambda: stream.end, 10, "an end")
        assert stream.end["code"] == "overloaded"
        assert took_s < 2.0
        wait_for(lambda: running.supervisor.is_finished, 5, "the end, which nothing is waited for")
        assert engine.epoch == 0


def test_what_waits_for_an_engine_ends_with_the_drain(tmp_path: Path) -> None:
    """Its engine starts, but not in time. The request has no engine yet, and hears of the end all the same."""
    with Running(tmp_path, notice_s=1.0, drain_s=2.0) as running:
        engine = running.part("engine-0")
        (running.model / "engine-0.hang").touch()
        os.kill(engine.child.pid, signal.SIGKILL)
        wait_for(lambda: engine.state == "starting", 10, "its next life")
        waiting = OpenStream(running, 5, wait=False)
        time.sleep(0.3)
        running.supervisor.request_stop("test", 1.0)
        wait_for(lambda: waiting.end, 3.0 + 2.0, "its end")
        assert waiting.end["code"] == "overloaded", waiting.end

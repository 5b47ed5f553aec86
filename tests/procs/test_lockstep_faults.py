"""Engines in lock step that are killed, stopped or idle, behind the HTTP port: /ready says what is so, and no token is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.deployment import Supervised, wait_for
from tests.procs.fake_llm import expected, fake_model, prompt_of, until
from trireme.launch.processes.supervisor import Supervisor, SupervisorTimeouts
from trireme.resolve import prepare
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.connect import client_over_sockets
from trireme.settings import load

pytestmark = pytest.mark.timeout(180)
BAD_TOKEN = 94  # in no other prompt
FENCE_S = 5.0  # until what is stuck is given up


class Node(Supervised):
    """`trireme serve --ep --dp 2` with the fake worker, without a console."""

    def __init__(self, directory: Path, *, executor: str = "inproc", **fake: Any) -> None:
        model = fake_model(directory, **fake)
        settings = {"model": str(model), "served_name": "fake", "worker": "fake", "dp": 2, "ep": True, "port": 0}
        settings |= {"max_len": 1024, "num_blocks": 512, "executor": executor, "check": True}
        settings["step_timeout"] = FENCE_S
        self.config = prepare(load(settings).config).config
        super().__init__(Supervisor(self.config, lambda event: None, timing=SupervisorTimeouts(stuck_s=FENCE_S)))

    def get(self, path: str, body: Any = None) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
        except OSError as error:
            return 0, str(error)

    async def tokens(self, prompt: list[int], count: int) -> list[int]:
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        status, answer = await asyncio.to_thread(self.get, "/v1/completions", body)
        assert status == 200, answer
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def pid(self, name: str) -> int:
        child = self.part(name).child
        assert child is not None
        return child.pid

    def epochs(self) -> list[int]:
        return [part.epoch for part in self.supervisor.parts if part.role == "engine"]

    def unready_s(self) -> float:
        """Seconds until /ready is false."""
        began = time.monotonic()
        wait_for(lambda: self.get("/ready")[0] == 503, 10, "/ready is false")
        return time.monotonic() - began

    def is_up(self) -> bool:
        status, answer = self.get("/ready")
        return status == 200 and answer["status"] == "ready"


@contextlib.asynccontextmanager
async def client_of(node: Node) -> AsyncIterator[EngineClient]:
    """As a program on the same machine joins (launch/api/client.py)."""
    client = client_over_sockets(node.supervisor.boot_for("front", "client-1"), node.config)
    client.start()
    try:
        await client.wait_up(10)
        yield client
    finally:
        client.close()


async def running(client: EngineClient, least: int) -> None:
    async def enough() -> bool:
        return sum([(await client.call(engine, "stats"))["num_running"] for engine in range(2)]) >= least

    await until(enough, f"{least} rows run")


def asked(node: Node, count: int, length: int) -> list[asyncio.Future[list[int]]]:
    return [asyncio.ensure_future(node.tokens(prompt_of(40 + i, i), length)) for i in range(count)]


def right(count: int, length: int) -> list[list[int]]:
    return [expected(prompt_of(40 + i, i), length) for i in range(count)]


async def test_a_pause_is_not_ready(tmp_path: Path) -> None:
    with Node(tmp_path, delay_ms=5) as node:
        async with client_of(node) as client:
            answers = asked(node, 4, 100)
            await running(client, 4)
            await client.direct("keep", 10.0)
            status, answer = await asyncio.to_thread(node.get, "/ready")
            assert (status, answer["status"]) == (503, "paused")
            assert [engine["stalled"] for engine in answer["engines"]] == ["it is paused (keep)"] * 2
            await asyncio.sleep(2.5)
            assert node.epochs() == [0, 0]
            await client.direct("", 10.0)
            await until(lambda: asyncio.to_thread(node.is_up), "ready again")
            assert await asyncio.gather(*answers) == right(4, 100)


@pytest.mark.parametrize("victim", ["engine-0", "engine-1", "worker"])
async def test_who_is_killed_in_a_wave_takes_the_others_along(tmp_path: Path, victim: str) -> None:
    """No rank waits in a collective for the dead one: both are replaced at once, and every stream goes on."""
    executor = "procs" if victim == "worker" else "inproc"
    with Node(tmp_path, executor=executor, delay_ms=5) as node:
        async with client_of(node) as client:
            answers = asked(node, 4, 120)
            await running(client, 4)
            if victim == "worker":
                pid = (await client.call(1, "workers"))[0]["pid"]
            else:
                pid = node.pid(victim)
            os.kill(pid, signal.SIGKILL)
            assert await asyncio.to_thread(node.unready_s) < 2.0
            began = time.monotonic()
            assert await asyncio.gather(*answers) == right(4, 120)
            assert time.monotonic() - began < 15.0
            assert node.epochs() == [1, 1]
            await until(lambda: asyncio.to_thread(node.is_up), "ready again")
            assert await node.tokens(prompt_of(9, 3), 5) == expected(prompt_of(9, 3), 5)


@pytest.mark.parametrize("what", ["engine", "worker"])
async def test_who_is_stopped_in_a_wave_is_told_and_fenced(tmp_path: Path, what: str) -> None:
    executor = "procs" if what == "worker" else "inproc"
    with Node(tmp_path, executor=executor, delay_ms=5) as node:
        async with client_of(node) as client:
            answers = asked(node, 4, 100)
            await running(client, 4)
            pid = node.pid("engine-1") if what == "engine" else (await client.call(1, "workers"))[0]["pid"]
            os.kill(pid, signal.SIGSTOP)
            assert await asyncio.to_thread(node.unready_s) < 2.0
            _, answer = await asyncio.to_thread(node.get, "/ready")
            assert all(engine["stalled"] for engine in answer["engines"])
            assert await asyncio.gather(*answers) == right(4, 100)
            assert node.epochs() == [1, 1]
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_a_stop_that_passes_harms_nobody(tmp_path: Path) -> None:
    with Node(tmp_path, delay_ms=5) as node:
        async with client_of(node) as client:
            answers = asked(node, 4, 150)
            await running(client, 4)
            os.kill(node.pid("engine-0"), signal.SIGSTOP)
            assert await asyncio.to_thread(node.unready_s) < 2.0
            await asyncio.sleep(2.0)
            os.kill(node.pid("engine-0"), signal.SIGCONT)
            assert await asyncio.gather(*answers) == right(4, 150)
            assert node.epochs() == [0, 0]
            await until(lambda: asyncio.to_thread(node.is_up), "ready again")


@pytest.mark.parametrize("fault", ["die_token", "hang_token"])
async def test_a_request_that_ends_the_group_twice_is_the_only_one_to_fail(tmp_path: Path, fault: str) -> None:
    """A worker that never comes back from its step is seen as soon as one that is gone, and both ranks are replaced."""
    with Node(tmp_path, delay_ms=5, **{fault: BAD_TOKEN}) as node:
        async with client_of(node) as client:
            answers = asked(node, 3, 200)
            await running(client, 3)
            body = {"prompt": [40, BAD_TOKEN], "max_tokens": 4, "temperature": 0}
            bad = asyncio.ensure_future(asyncio.to_thread(node.get, "/v1/completions", body))
            assert await asyncio.to_thread(node.unready_s) < 3.0
            status, answer = await bad
            assert (status, answer["error"]["code"]) == (422, "request_quarantined")
            assert await asyncio.gather(*answers) == right(3, 200)
            assert node.epochs() == [2, 2]


async def test_a_drain_ends_what_runs_and_all_leave(tmp_path: Path) -> None:
    with Node(tmp_path, delay_ms=5) as node:
        async with client_of(node) as client:
            answers = asked(node, 4, 60)
            await running(client, 4)
            node.supervisor.request_stop("asked to")
            assert await asyncio.gather(*answers) == right(4, 60)
        await asyncio.to_thread(wait_for, lambda: node.supervisor.is_finished, 20, "the end")
        assert (node.supervisor.exit_code, node.supervisor.failed) == (0, None)


async def test_parked_and_paused_engines_leave_the_processor_alone(tmp_path: Path) -> None:
    with Node(tmp_path, delay_ms=5) as node:
        assert await node.tokens(prompt_of(9, 3), 5) == expected(prompt_of(9, 3), 5)
        names = ("engine-0", "engine-1", "coordinator")
        assert await busy_share(node, names) < 0.05
        async with client_of(node) as client:
            answers = asked(node, 2, 100)
            await running(client, 2)
            await client.direct("keep", 10.0)
            assert await busy_share(node, names) < 0.10
            await client.direct("", 10.0)
            assert await asyncio.gather(*answers) == right(2, 100)


async def busy_share(node: Node, names: tuple[str, ...], seconds: float = 3.0) -> float:
    """Processor time of the busiest one, per second."""
    before = [processor_s(node.pid(name)) for name in names]
    await asyncio.sleep(seconds)
    return max(processor_s(node.pid(name)) - s for name, s in zip(names, before, strict=True)) / seconds


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

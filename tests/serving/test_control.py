"""Sleep, wake, pause and resume over HTTP: who may, what is refused and how, and what the engines do then."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_stub
from tests.serving.deployment import Served, serve_model
from trireme.serving.api.control import ADMIN

BOSS = {"authorization": "Bearer boss"}
TEXT = {"model": "stub", "prompt": "hello", "max_tokens": 8, "temperature": 0}


@contextlib.asynccontextmanager
async def server(directory: Path, *, delay_ms: float = 0.0, **settings: Any) -> AsyncIterator[Served]:
    """One real engine whose worker can sleep, as that of a GPU can."""
    model = make_stub(directory / "m", scripts=[["a" * 64]], delay_ms=delay_ms)
    async with serve_model(model, **{"worker": "fake", "admin_key": "boss", **settings}) as served:
        yield served


async def ask(served: Served, method: str, path: str, headers: dict[str, str] = BOSS) -> tuple[int, Any]:
    status, _, body = await served.request(method, path, headers=headers)
    return status, json.loads(body)


async def test_an_engine_sleeps_and_work_or_a_word_wakes_it(tmp_path: Path) -> None:
    async with server(tmp_path) as served:
        answer = (await served.post("/v1/completions", TEXT))[1]["choices"][0]["text"]
        awake = {"engine": 0, "state": "awake", "sleep_level": 0, "pause": ""}
        assert await ask(served, "GET", "/is_sleeping") == (200, {"is_sleeping": False, "engines": [awake]})
        for path, level in (("/sleep", 1), ("/sleep?level=2", 2), ("/sleep?level=1", 2)):  # (it sleeps deep enough)
            status, found = await ask(served, "POST", path)
            assert (status, found["is_sleeping"], found["engines"][0]["sleep_level"]) == (200, True, level)
        assert (await served.request("GET", "/ready"))[0] == 200  # work would wake it
        for path in ("/wake_up", "/wake_up"):
            assert await ask(served, "POST", path) == (200, {"is_sleeping": False, "engines": [awake]})
        await ask(served, "POST", "/sleep")
        assert (await served.post("/v1/completions", TEXT))[1]["choices"][0]["text"] == answer
        assert await ask(served, "GET", "/is_sleeping") == (200, {"is_sleeping": False, "engines": [awake]})
        await ask(served, "POST", "/sleep")
        assert (await ask(served, "POST", "/wake_up?tags=weights&tags=kv_cache"))[0] == 200


async def test_a_pause_holds_what_comes_until_it_ends(tmp_path: Path) -> None:
    async with server(tmp_path) as served:
        for path, mode in (("/pause?mode=keep", "keep"), ("/pause?mode=abort", "abort"), ("/pause", "wait")):
            status, found = await ask(served, "POST", path)
            assert (status, found["is_paused"], found["engines"][0]["pause"]) == (200, True, mode)
        late = asyncio.ensure_future(served.post("/v1/completions", TEXT))
        await asyncio.sleep(0.2)
        assert not late.done()
        assert (await ask(served, "GET", "/is_paused"))[1]["is_paused"]
        status, found = await ask(served, "POST", "/resume")
        assert (status, found["is_paused"]) == (200, False)
        assert (await late)[0] == 200


async def test_a_busy_engine_does_not_sleep_and_says_why(tmp_path: Path) -> None:
    async with server(tmp_path, delay_ms=20) as served:
        running = asyncio.ensure_future(served.post("/v1/completions", {**TEXT, "max_tokens": 60}))
        async with asyncio.timeout(5):
            while not (await served.front.client.call(0, "stats"))["num_running"]:
                await asyncio.sleep(0.01)
        status, found = await ask(served, "POST", "/sleep")
        assert (status, found["error"]["code"]) == (409, "not_now")
        assert "1 requests are under way" in found["error"]["message"]
        assert not running.done()
        assert (await running)[0] == 200


@pytest.mark.parametrize(
    ("path", "param", "words"),
    [
        ("/sleep?level=3", "level", "1 keeps the weights in the host's memory, 2 drops them"),
        ("/sleep?level=", "level", "2 drops them"),
        ("/sleep?level=1&level=2", "level", "given twice"),
        ("/sleep?lvl=1", "lvl", "there is level"),
        ("/wake_up?tags=weights", "tags", "wake together"),
        ("/pause?mode=never", "mode", "there are abort, wait, keep"),
        ("/resume?mode=wait", "mode", "there is none"),
        ("/sleep?level=" + "1" * 2000, None, "the limit is 1024"),
    ],
)
async def test_arguments_are_checked_before_anything_is_done(
    tmp_path: Path, path: str, param: str | None, words: str
) -> None:
    async with server(tmp_path) as served:
        status, found = await ask(served, "POST", path)
        assert (status, found["error"]["param"]) == (400, param)
        assert words in found["error"]["message"]
        engine = (await ask(served, "GET", "/is_sleeping"))[1]["engines"][0]
        assert (engine["state"], engine["pause"]) == ("awake", "")


async def test_only_admin_keys_change_the_server(tmp_path: Path) -> None:
    async with server(tmp_path, api_key="user", admin_key="boss,chief") as served:
        for path in sorted(ADMIN):
            for key in ("user", "bos", ""):
                status, found = await ask(served, "POST", path, {"authorization": f"Bearer {key}"})
                assert (status, found["error"]["code"]) == (401, "invalid_api_key")
        assert (await ask(served, "GET", "/is_sleeping", {"authorization": "Bearer user"}))[0] == 200
        assert (await ask(served, "GET", "/is_sleeping", {}))[0] == 401
        for key in ("boss", "chief"):
            for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/v1/models")):
                assert (await ask(served, method, path, {"x-api-key": key}))[0] == 200
        assert (await ask(served, "GET", "/sleep"))[0] == 405
        assert (await ask(served, "POST", "/sleep/"))[0] == 404


async def test_without_an_admin_key_nobody_may(tmp_path: Path) -> None:
    async with server(tmp_path, admin_key=(), api_key="user") as served:
        for path in sorted(ADMIN):
            for key in ("user", "", "boss"):
                status, found = await ask(served, "POST", path, {"authorization": f"Bearer {key}"})
                assert (status, found["error"]["code"]) == (403, "forbidden")
                assert "--admin-key" in found["error"]["message"]
        assert not (await ask(served, "GET", "/is_sleeping", {"x-api-key": "user"}))[1]["is_sleeping"]


async def test_an_engine_on_a_cpu_says_that_it_has_no_sleep(tmp_path: Path) -> None:
    async with server(tmp_path, worker="torch") as served:
        status, found = await ask(served, "POST", "/sleep")
        assert (status, found["error"]["code"]) == (501, "not_implemented")
        assert "--device cuda" in found["error"]["message"]
        assert (await ask(served, "POST", "/wake_up"))[0] == 200  # it is awake
        assert (await served.post("/v1/completions", TEXT))[0] == 200

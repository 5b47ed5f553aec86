"""The door as callers meet it: quotas by key, classes, deadlines that only shorten, refusals that come at once."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models.tiny import EOS
from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.errors import ConfigError
from trireme.serving.admission.admission import read_grants
from trireme.transport.wire.messages import Submit

TEXT = {"model": "stub", "prompt": "hello", "max_tokens": 4}
CLIENTS = """
clients:
  - {key: team-a, requests_per_minute: 2, priority: -1}
  - {key: team-b, tokens_per_minute: 60}
  - {key: team-c}
"""


def quota_file(directory: Path, text: str = CLIENTS) -> str:
    path = directory / "quotas.yaml"
    path.write_text(text)
    return str(path)


def client(served: Served, key: str) -> openai.AsyncOpenAI:
    return served.openai.with_options(api_key=key)


def submits(served: Served) -> list[Submit]:
    return [message for message in served.engine.log if isinstance(message, Submit)]


async def test_each_key_has_its_own_quota(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS)), quotas=quota_file(tmp_path)) as served:
        a, b, c = (client(served, key) for key in ("team-a", "team-b", "team-c"))
        raw = await a.completions.with_raw_response.create(**TEXT)
        assert raw.headers["x-ratelimit-limit-requests"] == "2"
        assert raw.headers["x-ratelimit-remaining-requests"] == "1"
        await a.completions.create(**TEXT)
        with pytest.raises(openai.RateLimitError) as refused:
            await a.completions.create(**TEXT)
        assert refused.value.status_code == 429
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 61
        await b.completions.create(**TEXT, n=8)  # 5 + 8 x 3 tokens
        await b.completions.create(**TEXT, n=16)  # into debt: the length of answers is not known before
        with pytest.raises(openai.RateLimitError, match="60 tokens per minute"):
            await b.completions.create(**TEXT)
        for _ in range(4):
            await c.completions.create(**TEXT)
        with pytest.raises(openai.AuthenticationError):
            await client(served, "stranger").completions.create(**TEXT)
        assert (await served.request("GET", "/ready"))[0] == 200, "probes have no quota"


async def test_the_default_quota_is_that_of_an_address(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS)), requests_per_minute=3) as served:
        statuses = [(await served.post("/v1/completions", TEXT))[0] for _ in range(4)]
        assert statuses == [200, 200, 200, 429]
        assert (await served.post("/tokenize", {"prompt": "x"}))[0] == 429


async def test_engines_hear_of_the_client_and_its_class(tmp_path: Path) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS)), quotas=quota_file(tmp_path)) as served:
        a, c = client(served, "team-a"), client(served, "team-c")
        await a.completions.create(**TEXT, extra_body={"service_tier": "priority"})
        await c.completions.create(**TEXT, user="ann", extra_body={"priority": -7})
        await c.completions.create(**TEXT, user="bob", extra_body={"service_tier": "flex"})
        await c.completions.create(**TEXT, user="ann", extra_body={"priority": 5})
        found = submits(served)
        assert [submit.priority for submit in found] == [-1, 0, 1, 5], "a key cannot ask for more than it was granted"
        assert len({submit.client for submit in found}) == 3
        assert found[1].client == found[3].client
        assert all(len(submit.client) == 16 for submit in found)
        assert not any(b"ann" in submit.client or b"team" in submit.client for submit in found)


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, (60.0, 30.0)),
        ({"timeout": 5}, {}, (60.0, 5.0)),
        ({"timeout": 500}, {}, (60.0, 30.0)),
        ({"timeout": 20}, {"x-request-timeout": "2.5"}, (60.0, 2.5)),
        ({"queue_timeout": 7}, {"x-request-timeout": "90"}, (7.0, 30.0)),
        ({"queue_timeout": 600}, {}, (60.0, 30.0)),
    ],
)
async def test_deadlines_only_shorten(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], expected: tuple[float, float]
) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS)), request_timeout=30.0) as served:
        status, answer = await served.post("/v1/completions", {**TEXT, **body}, **headers)
        assert status == 200, answer
        (submit,) = submits(served)
        assert submit.deadline_s == expected[0]
        assert submit.total_s == pytest.approx(expected[1], abs=0.5)


@pytest.mark.parametrize("value", [0, -1, 1e9, "soon", True])
async def test_deadlines_that_are_none_are_refused(tmp_path: Path, value: Any) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS))) as served:
        status, answer = await served.post("/v1/completions", {**TEXT, "timeout": value})
        assert (status, answer["error"]["param"]) == (400, "timeout")
        if not isinstance(value, bool):
            status, answer = await served.post("/v1/completions", TEXT, **{"x-request-timeout": str(value)})
            assert (status, answer["error"]["param"]) == (400, "timeout")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_holds_although_no_engine_says_a_word(tmp_path: Path, stream: bool) -> None:
    engine = FakeEngine(words("ok", EOS))
    async with serve(tmp_path, engine) as served:
        engine.hold.clear()
        began = time.monotonic()
        body = {**TEXT, "n": 2, "timeout": 0.2, "stream": stream}
        status, headers, answer = await served.request("POST", "/v1/completions", body)
        assert (status, headers["x-should-retry"]) == (504, "false")
        assert json.loads(answer)["error"]["code"] == "deadline_exceeded"
        assert time.monotonic() - began < 3
        await served.quiet()
        async with asyncio.timeout(5):
            while len(engine.aborted) < 2:
                await asyncio.sleep(0.01)


async def test_requests_that_can_wait_leave_room_for_the_others(tmp_path: Path) -> None:
    """Ten places: half of them for flex, all for default."""
    engine = FakeEngine([259] * 50, max_num_seqs=4, max_waiting=6)
    async with serve(tmp_path, engine, extra=["word"]) as served:
        engine.hold.clear()
        long = {**TEXT, "max_tokens": 40}
        tasks = [asyncio.create_task(served.post("/v1/completions", {**long, "priority": 3})) for _ in range(5)]
        await rows(served, 5)
        status, answer = await served.post("/v1/completions", {**long, "service_tier": "flex"})
        assert (status, answer["error"]["code"]) == (503, "overloaded")
        assert "of this priority; the limit is 5" in answer["error"]["message"]
        tasks += [asyncio.create_task(served.post("/v1/completions", long)) for _ in range(5)]
        await rows(served, 10)
        assert (await served.post("/v1/completions", long))[0] == 503
        engine.hold.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 10


async def rows(served: Served, count: int) -> None:
    async with asyncio.timeout(5):
        while served.front.client.num_choices < count:
            await asyncio.sleep(0.005)


async def test_a_queue_that_is_too_slow_closes_the_door(tmp_path: Path) -> None:
    """The adaptive limit: waits above the target lower it, and requests are refused that the queue would still take."""
    engine = FakeEngine([259] * 8, max_num_seqs=2, max_waiting=400)
    engine.queued_s = 5.0
    async with serve(tmp_path, engine, extra=["word"], target_wait=0.2) as served:
        for _ in range(4):
            await asyncio.gather(*(served.post("/v1/completions", TEXT) for _ in range(40)))
            await asyncio.sleep(0.21)
        engine.hold.clear()
        tasks = [asyncio.create_task(served.post("/v1/completions", TEXT)) for _ in range(100)]
        while sum(task.done() for task in tasks) + served.front.client.num_choices < 100:
            await asyncio.sleep(0.01)
        admitted = served.front.client.num_choices
        assert 2 <= admitted < 60
        urgent = asyncio.create_task(served.post("/v1/completions", {**TEXT, "priority": -1}))
        await asyncio.sleep(0.1)
        assert served.front.client.num_choices == admitted + 1
        engine.hold.set()
        assert (await urgent)[0] == 200
        refused = [answer for status, answer in await asyncio.gather(*tasks) if status == 503]
        assert len(refused) == 100 - admitted


async def test_refusals_come_at_once(tmp_path: Path) -> None:
    """Three times what fits, all at one time: whoever is refused knows it in a moment, with Retry-After, and nobody is lost."""
    engine = FakeEngine([259] * 60, max_num_seqs=8, max_waiting=32, step_s=0.02)
    async with serve(tmp_path, engine, extra=["word"]) as served:
        body = {**TEXT, "max_tokens": 50}
        waiting = [asyncio.create_task(served.post("/v1/completions", body)) for _ in range(40)]
        while served.front.client.num_choices < 40:
            await asyncio.sleep(0.005)

        async def refused() -> float:
            start = time.monotonic()
            status, headers, answer = await served.request("POST", "/v1/completions", body)
            assert (status, headers["retry-after"]) == (503, "1"), answer
            assert json.loads(answer)["error"]["code"] == "overloaded"
            return time.monotonic() - start

        times = [await refused() for _ in range(80)]
        assert sorted(times)[len(times) * 99 // 100] < 0.25, "50 ms on a quiet machine"
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200] * 40
        await served.quiet()


async def test_a_slow_reader_of_a_whole_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.serving.http.sse.STALL_S", 0.5)
    engine = FakeEngine([259] * 20_000, max_len=40_000)
    async with serve(tmp_path, engine, extra=["long text " * 100]) as served:
        body = json.dumps({**TEXT, "max_tokens": 20_000}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        _, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head + body)
        try:
            async with asyncio.timeout(20):
                while served.front.num_inside == 0:
                    await asyncio.sleep(0.01)
                while served.front.num_inside:
                    await asyncio.sleep(0.05)
            numbers = await served.numbers()
        finally:
            writer.transport.abort()
        assert numbers["trireme_slow_readers_total"] == 1
        assert numbers['trireme_requests_total{outcome="error"}'] == 1


@pytest.mark.parametrize(
    ("text", "words_of_it"),
    [
        ("clients: [{key: a, requests_per_minute: -1}]", r"\$\.clients\[0\]\.requests_per_minute"),
        ("clients: [{key: a, rate: 1}]", "unknown field `rate`"),
        ("clients: [{name: a}]", "missing required field `key`"),
        ("clients: {", "quotas"),
    ],
)
def test_a_wrong_quota_file_is_named(tmp_path: Path, text: str, words_of_it: str) -> None:
    with pytest.raises(ConfigError, match=words_of_it):
        read_grants(quota_file(tmp_path, text))


def test_a_missing_quota_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_grants(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({}, {}, 0.0),
        ({"service_tier": "flex"}, {}, 0.2),
        ({"service_tier": "priority"}, {}, 0.0),
        ({"service_tier": "flex"}, {"x-itl-target": "25ms"}, 0.025),
        ({}, {"x-itl-target": "off"}, math.inf),
    ],
)
async def test_targets_between_tokens_by_tier_and_request(
    tmp_path: Path, body: dict[str, Any], headers: dict[str, str], expected: float
) -> None:
    async with serve(tmp_path, FakeEngine(words("ok", EOS)), itl_target="50ms,flex=200ms") as served:
        status, answer = await served.post("/v1/completions", {**TEXT, **body}, **headers)
        assert status == 200, answer
        assert [submit.itl_target_s for submit in submits(served)] == [expected]
        status, answer = await served.post("/v1/completions", TEXT, **{"x-itl-target": "soon"})
        assert (status, answer["error"]["param"]) == (400, "x-itl-target")
        assert "a number and a unit" in answer["error"]["message"]

"""Benchmark arithmetic, the HTTP client against a scripted server, and the room that a large batch is given."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

import pytest

from trireme.errors import ConfigError
from trireme.launch.api.batch import InFlight
from trireme.launch.api.http import ServerError, endpoint, get_json, stream
from trireme.launch.bench.load import Applied
from trireme.launch.bench.samples import WORDS, Sample, make_ids, make_text, summarize
from trireme.launch.bench.slo import Slo


def test_summary_of_known_samples():
    samples = [
        Sample(0.0, (0.1, 0.2, 0.3), 10, 3),
        Sample(0.0, (0.2, 0.4, 0.6), 30, 3),
        Sample(0.0, (), 0, 0, "the server answered 503"),
    ]
    figures = summarize(samples, 2.0)
    assert figures["requests"] == 3
    assert figures["errors"] == 1
    assert figures["output_tok_s"] == 3
    assert figures["total_tok_s"] == 23
    assert figures["ttft_p50_ms"] == pytest.approx(150)
    assert figures["itl_p50_ms"] == pytest.approx(150)
    assert figures["stream_tok_s"] == pytest.approx((10 + 5) / 2)
    assert figures["ttft_p95_ms"] == pytest.approx(195)  # of 100 and 200
    assert (
        figures["itl_p95_ms"] == figures["itl_p99_ms"] == figures["itl_max_ms"] == pytest.approx(200)
    )  # of 2 x 100, 2 x 200
    assert not {"goodput_req_s", "attainment"} & figures.keys()


def test_every_gap_of_every_request_counts():
    """A stall among 101 tokens is the largest gap and is not in the mean of its request: of 200 gaps one is 1000 ms."""
    steady = Sample(0.0, tuple(0.5 + 0.01 * i for i in range(101)), 8, 101)
    stalled = steady._replace(times=(*steady.times[:50], *(at + 0.99 for at in steady.times[50:])))
    figures = summarize([steady, stalled], 10.0)
    assert [figures[f"itl_p{percent}_ms"] for percent in (50, 95, 99)] == pytest.approx([10, 10, 10])
    assert figures["itl_max_ms"] == pytest.approx(1000)


def test_goodput_of_known_samples():
    """Of five requests in 4 s: good, late first token, one long gap, good with a single token, failed."""
    good = Sample(1.0, (1.1, 1.15, 1.2), 8, 3)
    samples = [
        good,
        good._replace(times=(2.3, 2.35, 2.4)),
        good._replace(times=(1.1, 1.15, 1.5)),
        good._replace(times=(1.2,)),
        good._replace(error="the server answered 503"),
    ]
    figures = summarize(samples, 4.0, Slo(ttft_ms=1000, itl_ms=100))
    assert figures["goodput_req_s"] == 2 / 4
    assert figures["attainment"] == 2 / 5
    assert summarize(samples, 4.0, Slo(e2e_ms=450))["attainment"] == 2 / 5  # 200, 1400, 500 and 200 ms
    assert summarize(samples[4:], 4.0, Slo(e2e_ms=450))["attainment"] == 0


def test_summary_of_failures_only_has_no_times():
    assert math.isnan(summarize([Sample(0.0, (), 0, 0, "x")], 1.0)["ttft_p50_ms"])


def test_clients_that_fall_behind_a_rate_are_late():
    assert not Applied([], 12.0, due_s=10.0, lag_s=0.9).is_late
    assert Applied([], 12.0, due_s=10.0, lag_s=1.1).is_late


def test_prompts_are_repeatable_and_share_no_beginning():
    assert make_text(50, 1) == make_text(50, 1)
    assert len(make_text(50, 1).split()) == 50
    starts = {tuple(make_text(20, seed).split()[:6]) for seed in range(200)}
    assert len(starts) == 200
    assert len(WORDS) == len(set(WORDS))
    ids = make_ids(1000, 320, 3)
    assert len(ids) == 1000
    assert all(160 <= token < 320 for token in ids)
    assert max(make_ids(1000, 50000, 3)) < 32000


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:port", "http://host:99999"])
def test_addresses_that_are_none(url):
    with pytest.raises(ConfigError, match="--url"):
        endpoint(url)


def test_addresses():
    assert endpoint("127.0.0.1:8000").url == "http://127.0.0.1:8000"
    assert endpoint("https://host/v1/").url == "https://host:443"
    assert endpoint("http://[::1]:80/base") == ("::1", 80, False, "/base", "")
    assert endpoint("http://[::1]:80/base").url == "http://[::1]:80/base"
    assert endpoint("[::1]:80").authority == "[::1]:80"
    link_local = endpoint("http://[fe80::1%25eth0]:80")
    assert (link_local.host, link_local.url) == ("fe80::1%eth0", "http://[fe80::1%25eth0]:80")


def served(answer: bytes):
    """Runs `check(endpoint)` against a server that gives `answer` once, in pieces of three bytes."""

    async def play(check):
        seen = []

        async def on_client(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head)
            for i in range(0, len(answer), 3):
                writer.write(answer[i : i + 3])
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(on_client, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await check(endpoint(f"http://127.0.0.1:{port}", "sesame")), seen[0]

    return play


OK = b"HTTP/1.1 200 OK\r\n"


async def collect(to):
    return [event async for event in stream(to, "/v1/completions", {"a": 1})]


async def test_a_chunked_stream_of_events():
    body = b'data: {"n": 1}\n\ndata: {"n": "\xc3\xa9"}\r\n\r\n: ping\n\ndata: [DONE]\n\n'
    pieces = [body[:11], body[11:40], body[40:]]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in pieces) + b"0\r\n\r\n"
    events, head = await served(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked)(collect)
    assert events == [{"n": 1}, {"n": "\u00e9"}]
    assert b"Authorization: Bearer sesame" in head
    assert b"Content-Length: 7" in head


async def test_json_with_a_length_and_without():
    for answer in (OK + b'Content-Length: 7\r\n\r\n{"a":1}', OK + b'\r\n{"a":1}'):
        assert (await served(answer)(lambda to: get_json(to, "/x")))[0] == {"a": 1}


@pytest.mark.parametrize(
    ("answer", "words", "status"),
    [
        (b'HTTP/1.1 503 X\r\nContent-Length: 30\r\n\r\n{"error":{"message":"is full"}}'[:-1] + b"}", "is full", 503),
        (b"HTTP/1.1 404 X\r\n\r\nnothing here", "nothing here", 404),
        (OK + b'\r\ndata: {"error": {"message": "engine died"}}\n\n', "engine died", 200),
        (OK + b'\r\ndata: {"n": 1}\n\n', "closed the stream", 0),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n50\r\nabc", "broke", 0),
        (OK + b"\r\ndata: {n}\n\n", "not JSON", 0),
        (b"", "without an answer", 0),
    ],
)
async def test_a_bad_answer_is_an_error_with_the_servers_words(answer, words, status):
    with pytest.raises(ServerError, match=words) as caught:
        await served(answer)(collect)
    assert caught.value.status == status


async def test_nobody_listens():
    with pytest.raises(ServerError, match="no server answers"):
        await get_json(endpoint("http://127.0.0.1:9"), "/")


class Rows(NamedTuple):
    rows: tuple[int, ...]
    num_tokens: int


async def test_room_is_bounded_first_come_first_served_and_given_back():
    room = InFlight(max_rows=4, max_tokens=100)
    running: list[str] = []
    order: list[str] = []
    most = 0

    async def work(name, num_rows, tokens):
        nonlocal most
        async with room.room_for(Rows((0,) * num_rows, tokens)):
            running.append(name)
            order.append(name)
            most = max(most, len(running))
            await asyncio.sleep(0.01)
            running.remove(name)

    names = [f"w{i}" for i in range(12)]
    await asyncio.gather(*(work(name, 1, 10) for name in names))
    assert order == names
    assert most == 4
    await asyncio.gather(work("small", 1, 10), work("huge", 1, 1000), work("last", 1, 10))
    assert order[-3:] == ["small", "huge", "last"]
    assert room._used == [0, 0]


async def test_a_cancelled_wait_gives_its_turn_to_the_next():
    room = InFlight(max_rows=1, max_tokens=100)
    done = []

    async def work(name, seconds):
        async with room.room_for(Rows((0,), 1)):
            await asyncio.sleep(seconds)
            done.append(name)

    tasks = [asyncio.create_task(work(name, 0.02)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.sleep(0.005)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["c", "d"]
    assert room._used == [0, 0]

"""The client of several servers, against real ones that die, refuse, stall and break off."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from trireme import AsyncHosts, Hosts
from trireme.errors import OverloadedError
from trireme.launch.api.http import ServerError
from trireme.transport.resilience import Backoff
from trireme.transport.targets import Patience, TargetBusy, TargetFailed

ROOT = Path(__file__).resolve().parents[2]
QUICK = Patience(backoff=Backoff(base_s=0.01, cap_s=0.05), failures=2, rest_s=0.5, busy_s=3.0)


class Peer:
    def __init__(self, mode: str) -> None:
        command = [sys.executable, "-m", "tests.procs.peer_server", mode]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def seen(self) -> dict[str, int]:
        with urllib.request.urlopen(self.url + "/seen", timeout=5) as answer:
            return json.load(answer)

    def become(self, mode: str) -> None:
        urllib.request.urlopen(f"{self.url}/mode/{mode}", data=b"", timeout=5).close()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def peer() -> Iterator[Callable[[str], Peer]]:
    peers: list[Peer] = []

    def make(mode: str = "ok") -> Peer:
        peers.append(Peer(mode))
        return peers[-1]

    yield make
    for each in peers:
        each.kill()
        assert each.process.stdout is not None
        each.process.stdout.close()


def state_of(hosts: AsyncHosts, one: Peer) -> str:
    return next(state for url, state, _ in hosts.states() if url == one.url)


async def ask_until(hosts: AsyncHosts, one: Peer, state: str) -> set[int]:
    """Requests, all of which are answered, until the breaker of `one` is in this state. Returns who answered."""
    answered = set()
    async with asyncio.timeout(20):
        while state_of(hosts, one) != state:
            answered.add((await hosts.complete("x"))["port"])
    return answered


async def test_a_killed_server_is_left_alone_and_taken_back(peer: Callable[[str], Peer]) -> None:
    dead, well = peer("ok"), peer("ok")
    patience = msgspec.structs.replace(QUICK, rest_s=60.0)
    async with AsyncHosts([dead.url, well.url], patience=patience) as hosts:
        assert {(await hosts.complete("x"))["port"] for _ in range(20)} == {dead.port, well.port}
        dead.kill()
        assert await ask_until(hosts, dead, "open") == {well.port}
        assert {(await hosts.complete("x"))["port"] for _ in range(20)} == {well.port}
        assert state_of(hosts, well) == "closed"
        assert hosts._targets.num_retries == QUICK.failures, "a breaker that is open costs nobody a retry"


async def test_a_breaker_closes_when_the_server_is_well_again(peer: Callable[[str], Peer]) -> None:
    ill, well = peer("error"), peer("ok")
    async with AsyncHosts([ill.url, well.url], patience=QUICK) as hosts:
        assert await ask_until(hosts, ill, "open") == {well.port}
        ill.become("ok")
        assert ill.port in await ask_until(hosts, ill, "closed")
        assert {(await hosts.complete("x"))["port"] for _ in range(20)} == {ill.port, well.port}


async def test_a_server_that_refuses_is_waited_for_as_long_as_it_says(peer: Callable[[str], Peer]) -> None:
    full, well = peer("refuse"), peer("ok")
    async with AsyncHosts([full.url, well.url], patience=QUICK) as hosts:
        started = time.monotonic()
        for _ in range(20):
            assert (await hosts.complete("x"))["port"] == well.port
        assert full.seen()["requests"] <= 1 + (time.monotonic() - started), "once per Retry-After"
        assert state_of(hosts, full) == "closed", "it is busy, not broken"
    async with AsyncHosts([full.url], patience=QUICK) as hosts:
        full.become("quota")
        started = time.monotonic()
        asyncio.get_running_loop().call_later(0.5, lambda: asyncio.ensure_future(asyncio.to_thread(full.become, "ok")))
        assert (await hosts.complete("x"))["port"] == full.port
        assert 0.9 <= time.monotonic() - started < 3, "Retry-After is honoured"


async def test_a_server_that_stalls_is_given_up(peer: Callable[[str], Peer]) -> None:
    stalled, well = peer("stall"), peer("ok")
    async with AsyncHosts([stalled.url, well.url], patience=QUICK, answer_s=0.5) as hosts:
        assert await ask_until(hosts, stalled, "open") == {well.port}


async def test_hedging_is_off_by_default_and_takes_the_first_answer(peer: Callable[[str], Peer]) -> None:
    stalled, well = peer("stall"), peer("ok")
    patience = Patience(hedge_s=0.1, retry_ratio=1.0)
    async with AsyncHosts([stalled.url, well.url], patience=patience) as hosts:
        async with asyncio.timeout(20):  # the stalled one would take a minute
            while hosts._targets.num_hedges < 3:
                assert (await hosts.complete("x"))["port"] == well.port
        assert all(num_open == 0 for _, _, num_open in hosts.states()), "the slower one was cancelled"
    slow = peer("slow")
    async with AsyncHosts([slow.url, well.url]) as hosts:
        await asyncio.gather(*(hosts.complete("x") for _ in range(4)))
        assert hosts._targets.num_hedges == 0


async def test_retries_stop_when_the_budget_is_spent(peer: Callable[[str], Peer]) -> None:
    """Everything fails: the servers get a tenth more requests than there are, and not four times as many."""
    broken = [peer("error"), peer("error")]
    patience = Patience(backoff=Backoff(base_s=0.001, cap_s=0.002), failures=10_000, retry_reserve=5.0)
    async with AsyncHosts([each.url for each in broken], patience=patience) as hosts:
        for _ in range(100):
            with pytest.raises(TargetFailed, match="answered 500"):
                await hosts.complete("x")
    assert 100 <= sum(each.seen()["requests"] for each in broken) <= 100 + 5 + 10


async def test_when_no_server_is_left_the_error_says_so(peer: Callable[[str], Peer]) -> None:
    gone = peer("ok")
    gone.kill()
    patience = Patience(backoff=Backoff(base_s=0.01), failures=2, rest_s=5.0, busy_s=0.3, attempts=2)
    async with AsyncHosts([gone.url], patience=patience) as hosts:
        with pytest.raises(TargetFailed):
            await hosts.complete("x")
        with pytest.raises(OverloadedError, match="none of 1 servers"):
            await hosts.complete("x")


async def test_what_is_wrong_with_a_request_is_not_tried_again(peer: Callable[[str], Peer]) -> None:
    bad = peer("bad")
    async with AsyncHosts([bad.url], patience=QUICK) as hosts:
        with pytest.raises(ServerError) as refused:
            await hosts.complete("x")
        assert refused.value.status == 400
        assert bad.seen()["requests"] == 1


@pytest.mark.parametrize("mode", ["fail", "fail in words"])
async def test_an_error_inside_a_stream_is_told_in_the_servers_words(peer: Callable[[str], Peer], mode: str) -> None:
    async with AsyncHosts([peer(mode).url]) as hosts:
        events = hosts.stream("/v1/completions", {"prompt": "x"})
        assert [(await anext(events))["i"] for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ServerError, match="out of words"):
            await anext(events)


async def test_a_refusal_is_told_in_the_servers_words(peer: Callable[[str], Peer]) -> None:
    async with AsyncHosts([peer("bad").url]) as hosts:
        with pytest.raises(ServerError, match="^the server answered 400: bad$") as caught:
            await hosts.complete("x")
        assert caught.value.status == 400


async def test_a_stream_moves_before_its_first_event_and_not_after(peer: Callable[[str], Peer]) -> None:
    breaks, well = peer("break first"), peer("ok")
    patience = Patience(backoff=Backoff(base_s=0.001), failures=1000, retry_ratio=1.0)
    async with AsyncHosts([breaks.url, well.url], patience=patience) as hosts:
        for _ in range(8):
            found = [event async for event in hosts.stream("/v1/completions", {"prompt": "x"})]
            assert [event["i"] for event in found] == [0, 1, 2, 3, 4]
            assert {event["port"] for event in found} == {well.port}
    breaks.become("break")
    async with AsyncHosts([breaks.url], patience=patience) as hosts:
        events = hosts.stream("/v1/completions", {"prompt": "x"})
        seen = [(await anext(events))["i"] for _ in range(3)]
        with pytest.raises(TargetFailed, match="closed the stream before its end"):
            await anext(events)
        assert seen == [0, 1, 2], "nothing is told twice"


async def test_a_server_that_sends_without_end_is_given_up(
    peer: Callable[[str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.launch.api.multi_server.MAX_ANSWER", 1 << 20)
    monkeypatch.setattr("trireme.launch.api.multi_server.MAX_EVENT", 1 << 20)
    mad = peer("endless")
    async with AsyncHosts([mad.url], patience=Patience(attempts=1)) as hosts:
        with pytest.raises(TargetFailed, match="more than 1048576 bytes"):
            await hosts.complete("x")
        with pytest.raises(TargetFailed, match="more than 1048576 bytes"):
            await anext(hosts.stream("/v1/completions", {"prompt": "x"}))


async def test_connections_are_kept(peer: Callable[[str], Peer]) -> None:
    a, b = peer("ok"), peer("ok")
    async with AsyncHosts([a.url, b.url]) as hosts:
        for _ in range(30):
            await hosts.complete("x")
    counts = [a.seen(), b.seen()]
    assert sum(count["requests"] for count in counts) == 30
    assert all(count["connections"] <= 2 for count in counts), "one for all requests, one to ask"


def test_the_blocking_twin(peer: Callable[[str], Peer]) -> None:
    one = peer("ok")
    with Hosts([one.url]) as hosts:
        assert hosts.chat([{"role": "user", "content": "x"}])["port"] == one.port
        assert [event["i"] for event in hosts.stream("/v1/completions", {"prompt": "x"})] == [0, 1, 2, 3, 4]
    hosts.close()


async def test_a_server_that_stays_busy_ends_with_its_own_words(peer: Callable[[str], Peer]) -> None:
    full = peer("refuse")
    patience = Patience(attempts=1)
    async with AsyncHosts([full.url], patience=patience) as hosts:
        with pytest.raises(TargetBusy, match="refuse"):
            await hosts.complete("x")

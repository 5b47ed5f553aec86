"""Connections that a process has no handles for wait, under both event loops, and are served once it has. Front ends that listen on
one socket share what comes evenly."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from trireme.serving.http.accept import RESERVE, RETRY_S, Acceptor
from trireme.serving.http.connections import FRESH_S, ConnectionCounts


class Echo(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture
def allow() -> Iterator[Callable[[int], None]]:
    """Sets how many more handles this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def set_limit(num_spare: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        next_fd = os.dup(0)
        os.close(next_fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + num_spare, hard))

    yield set_limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def answered(clients: list[socket.socket]) -> list[bool]:
    """Which of them got back what they said. Raises ConnectionResetError."""
    found = []
    for client in clients:
        try:
            found.append(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 10), 0.1) == b"x")
        except TimeoutError:
            found.append(False)
    return found


def connected(listening: socket.socket, count: int) -> list[socket.socket]:
    clients = [socket.create_connection(listening.getsockname()) for _ in range(count)]
    for client in clients:
        client.sendall(b"x")
        client.setblocking(False)
    return clients


def test_without_handles_connections_wait(runner: asyncio.Runner, allow: Callable[[int], None]) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            clients = connected(listening, 3)
            acceptor = Acceptor(listening, Echo)
            allow(0)
            await asyncio.sleep(2 * RETRY_S)
            assert await answered(clients) == [False] * 3
            allow(RESERVE + 10)
            await asyncio.sleep(2 * RETRY_S)
            assert await answered(clients) == [True] * 3
            acceptor.close()
            late = connected(listening, 1)
            assert await answered(late) == [False]
            for client in (*clients, *late):
                client.close()
            await asyncio.sleep(0.05)

    runner.run(scenario())


def test_the_last_handles_are_kept(runner: asyncio.Runner, allow: Callable[[int], None]) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            clients = connected(listening, 8)
            allow(RESERVE)
            acceptor = Acceptor(listening, Echo)
            await asyncio.sleep(RETRY_S / 2)
            assert sum(await answered(clients)) <= 5  # one, and one more each RETRY_S
            acceptor.close()
            for client in clients:
                client.close()
            await asyncio.sleep(0.05)

    runner.run(scenario())


# ---------------------------------------------------------------- several front ends


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_counts_are_known_to_all_while_they_are_renewed(tmp_path: Path) -> None:
    clock = Clock()
    first, second, third = (ConnectionCounts(tmp_path / "counts", i, 3, clock=clock) for i in range(3))
    assert first.least_of_others() is None
    second.tell(7)
    third.tell(2**30)
    assert first.least_of_others() == 7
    assert second.least_of_others() == 2**24 - 1
    second.leave()
    assert first.least_of_others() == 2**24 - 1
    clock.now += FRESH_S + 0.1
    assert first.least_of_others() is None
    first.tell(0)
    assert second.least_of_others() == 0
    again = ConnectionCounts(tmp_path / "counts", 1, 3, clock=clock)  # a restarted front end
    assert again.least_of_others() == 0


class Front:
    """One of several that accept from the same socket, in one loop.."""

    def __init__(self, listening: socket.socket, path: Path, index: int, total: int, others: int = 0) -> None:
        self.num_open = others
        self._socket = listening.dup()
        counts = ConnectionCounts(path, index, total, clock=time.monotonic)
        self._acceptor = Acceptor(self._socket, self._opened, counts=counts, num_open=lambda: self.num_open)

    def _opened(self) -> Echo:
        self.num_open += 1
        return Echo()

    def close(self) -> None:
        self._acceptor.close()
        self._socket.close()


async def taken(listening: socket.socket, fronts: list[Front], count: int) -> list[int]:
    """How many each has once `count` connections have come."""
    clients = connected(listening, count)
    before = sum(front.num_open for front in fronts)
    async with asyncio.timeout(10):
        while sum(front.num_open for front in fronts) < before + count:
            await asyncio.sleep(0.005)
    for client in clients:
        client.close()
    return [front.num_open for front in fronts]


def test_front_ends_share_what_comes(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            fronts = [Front(listening, tmp_path / "even", i, 3) for i in range(3)]
            assert max(await taken(listening, fronts, 60)) <= 22
            for front in fronts:
                front.close()
            uneven = [Front(listening, tmp_path / "uneven", i, 2, others=i * 20) for i in range(2)]
            first, second = await taken(listening, uneven, 20)
            assert first >= 18  # it had 20 fewer
            assert second <= 22
            for front in uneven:
                front.close()
            await asyncio.sleep(0.05)

    runner.run(scenario())


def test_nobody_waits_for_a_front_end_that_takes_nothing(runner: asyncio.Runner, tmp_path: Path) -> None:
    """One that says it has none and yet does not accept delays each connection by a moment, and only while it is believed."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            stuck = ConnectionCounts(tmp_path / "counts", 1, 2, clock=time.monotonic)
            stuck.tell(0)
            fronts = [Front(listening, tmp_path / "counts", 0, 2, others=5)]
            assert await taken(listening, fronts, 10) == [15]
            await asyncio.sleep(FRESH_S)
            start = time.monotonic()
            assert await taken(listening, fronts, 50) == [65]
            assert time.monotonic() - start < 0.5  # with yielding it would take 50 x 10 ms
            fronts[0].close()
            await asyncio.sleep(0.05)

    runner.run(scenario())

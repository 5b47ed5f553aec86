"""Connections that a process has no handles for wait, under both event loops, and are served once it has."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop

from trireme.serving.http.accept import RESERVE, RETRY_S, Acceptor


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

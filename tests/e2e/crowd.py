"""How much idle connections and slow readers move the others: `python -m tests.e2e.crowd --idle 10000 --slow 1000`.

Starts two servers of its own with a worker that costs next to nothing, so that what is measured is the front end. Prints the
percentiles of the time to the first token and between tokens, of the one alone and of the one in the crowd. As many connections
are opened as file handles allow; how many that were is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import socket
import tempfile
import time
from pathlib import Path

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import NUM_BASE_TOKENS, make_stub
from trireme.metrics import percentile

FLAGS = ("--served-name", "tiny", "--worker", "fake", "--max-num-seqs", "256", "--max-waiting", "4000")
SPARE_HANDLES = 100
STEP_MS = 2.0
WORD, REPEATS = b"long text ", 100  # one token


def make_wordy(directory: Path, **fake: object) -> Path:
    """A model each of whose tokens is 1,000 bytes of text: readers fall behind after few of them. `fake`: of the worker."""
    model = make_stub(directory, extra=[(WORD * REPEATS).decode()], max_position=16384)
    config = json.loads((model / "config.json").read_text())
    config["stub"] = {"kind": "hash"}
    config["fake"] = {"low": NUM_BASE_TOKENS, "high": NUM_BASE_TOKENS, **fake}
    (model / "config.json").write_text(json.dumps(config))
    return model


class Crowd:
    """Connections that are open and do nothing, and streams that nobody reads."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.slow: list[socket.socket] = []

    async def open_idle(self, count: int) -> None:
        """Each has had one answer, so that it may stay for a while."""
        for start in range(0, count, 100):
            self.idle += await asyncio.gather(*(self._idle() for _ in range(min(100, count - start))))

    async def _idle(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b" 200 " in await reader.readline()
        return reader, writer

    async def open_slow(self, count: int, max_tokens: int) -> None:
        """A small receive buffer and no read: the server's own buffers fill."""
        fields = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
        loop = asyncio.get_running_loop()
        for _ in range(count):
            reader = socket.socket()
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", self.port))
            await loop.sock_sendall(reader, head + body)
            self.slow.append(reader)

    def close(self) -> None:
        for _, writer in self.idle:
            writer.transport.abort()
        for reader in self.slow:
            reader.close()


class Latency:
    """Of probes sent one after another: seconds to the first token, and between tokens."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.between: list[float] = []

    async def probe(self, port: int, num_tokens: int = 16) -> None:
        fields = {"model": "tiny", "prompt": "probe", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        last = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head % len(body) + body)
        count = 0
        async for line in reader:
            if line.startswith(b'data: {"id"'):
                now = time.monotonic()
                (self.between if count else self.first).append(now - last)
                last = now
                count += line.count(WORD) // REPEATS
        writer.close()
        assert count >= num_tokens, f"{count} tokens"

    def p99_ms(self) -> tuple[float, float]:
        return percentile(self.first, 99) * 1000, percentile(self.between, 99) * 1000


async def compare(
    empty: Deployment, full: Deployment, *, idle: int, slow: int, num_probes: int, rounds: int = 1
) -> tuple[Latency, Latency]:
    """Probes of two servers by turns, so that what else the machine does meets both alike: one alone, the other with the crowd.
    What the slow readers asked for is computed before, and waits for them: all of them are stalled, to the end."""
    alone, crowded, warm_up = Latency(), Latency(), Latency()
    for deployment in (empty, full) * 20:
        await warm_up.probe(deployment.port)
    for _ in range(rounds):
        crowd = Crowd(full.port)
        try:
            await crowd.open_idle(idle)
            await crowd.open_slow(slow, max_tokens=200)
            await asyncio.to_thread(wait_for, lambda: is_stalled(full, slow), 120, "all slow readers are stalled")
            for _ in range(num_probes):
                await alone.probe(empty.port)
                await crowded.probe(full.port)
            num_stalled = await asyncio.to_thread(full.metric, "trireme_streams_open")
            assert num_stalled >= slow, (
                f"{num_stalled:.0f} of {slow} streams were stalled to the end: measure for less long"
            )
        finally:
            crowd.close()
        await asyncio.to_thread(wait_for, lambda: is_stalled(full, 0), 120, "all streams are closed")
    return alone, crowded


def is_stalled(deployment: Deployment, num_streams: int) -> bool:
    """The engine has nothing to do, and so many streams are open."""
    try:
        num_rows = deployment.metric("trireme_requests_running") + deployment.metric("trireme_requests_waiting")
        return num_rows == 0 and deployment.metric("trireme_streams_open") == num_streams
    except (AssertionError, TimeoutError):
        return False  # too busy to say


def allowed_handles() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft - SPARE_HANDLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--slow", type=int, default=1000)
    parser.add_argument("--probes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    idle = min(options.idle, allowed_handles() - options.slow)
    with tempfile.TemporaryDirectory() as directory:
        model = make_wordy(Path(directory) / "tiny", delay_ms=STEP_MS)
        with Deployment(model, *FLAGS) as empty, Deployment(model, *FLAGS) as full:
            work = compare(empty, full, idle=idle, slow=options.slow, num_probes=options.probes, rounds=options.rounds)
            alone, crowded = asyncio.run(work)
            print(f"{idle} idle connections, {options.slow} slow readers; p99 in ms")
            for name, latency in (("alone", alone), ("crowd", crowded)):
                first, between = latency.p99_ms()
                medians = (percentile(latency.first, 50) * 1000, percentile(latency.between, 50) * 1000)
                print(
                    f"{name}  first token {first:.2f} (p50 {medians[0]:.2f})  between {between:.2f} (p50 {medians[1]:.2f})"
                )


if __name__ == "__main__":
    main()

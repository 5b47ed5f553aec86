"""`python -m trireme.transport.bench`: cost of a message without a model: codec, round trips, messages per second.

One server process that answers, one client in this process. Prints a table; nothing in production calls it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from trireme.params import RowParams
from trireme.transport.process.boot import BootChannel, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.aio import AsyncConnection
from trireme.transport.sockets.framing import HEAD_BYTES, head_of
from trireme.transport.sockets.names import Connection, Poller, Server
from trireme.transport.wire.codec import MessageDecoder, MessageEncoder
from trireme.transport.wire.columns import pack, pack_ids
from trireme.transport.wire.messages import (
    Abort,
    Boot,
    CoreToWorker,
    EngineToFront,
    FrontToEngine,
    NextToken,
    StepOutputs,
    StepPlan,
    StepResult,
    Submit,
    WorkerToCore,
)

ROWS = 64
NUM_TRIPS = 3000
NUM_MESSAGES = 20_000
WINDOW = 200


def messages() -> list[tuple[str, Any, Any]]:
    """One message of each kind on the per-step path, for ROWS sequences."""
    rows, ids = pack(range(ROWS)), pack_ids(range(ROWS))
    ones, lengths = pack([1] * ROWS), pack([500] * ROWS)
    plan = StepPlan(9, [], [], pack(range(4)), pack(range(4)), [], rows, ones, lengths, rows, b"\1" * ROWS)
    return [
        (f"StepPlan, {ROWS} decoding sequences", plan, CoreToWorker),
        ("NextToken, 4 new blocks", NextToken(9, pack(range(4)), pack(range(4))), CoreToWorker),
        (f"StepResult, {ROWS} sequences", StepResult(9, rows, rows), WorkerToCore),
        (f"StepOutputs, {ROWS} sequences", StepOutputs(0, 9, ids, rows), EngineToFront),
        ("Submit, 500 tokens", Submit(1, np.arange(500, dtype=np.int32), RowParams(max_tokens=9)), FrontToEngine),
        ("Submit, 100k tokens", Submit(1, np.arange(100_000, dtype=np.int32), RowParams(9)), FrontToEngine),
    ]


def microseconds(work: Callable[[], object], count: int = 5000) -> float:
    """Best of five batches, per call."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(count // 5):
            work()
        best = min(best, (time.perf_counter() - start) / (count // 5))
    return best * 1e6


def bench_codec() -> None:
    """Prints size, encode time and decode time of each message."""
    for name, message, union in messages():
        encoder, decoder = MessageEncoder(), MessageDecoder(union)
        frames = encoder.encode(message)
        size = sum(len(frame) for frame in frames)
        encode_us = microseconds(partial(encoder.encode, message))
        decode_us = microseconds(partial(decoder.decode, frames))
        print(f"{name:28} {size:8} bytes   encode {encode_us:6.2f} us   decode {decode_us:6.2f} us")


def main(channel: BootChannel) -> None:
    """The server process: answers every message with the outputs of one step."""
    outputs = StepOutputs(0, 9, pack_ids(range(ROWS)), pack(range(ROWS)))
    with Server.open(channel.boot, "engine-0.front", FrontToEngine) as server:

        def answer() -> None:
            for peer, message in server.receive():
                if isinstance(message, Abort):
                    server.send(peer, outputs)

        poller = Poller()
        poller.add(server, answer)
        poller.add(channel, lambda: None)
        channel.ready()
        while not channel.receive():
            poller.wait(None)


class Stopwatch:
    """Wall and CPU time (all threads of this process) of NUM_MESSAGES exchanges."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def report(self, name: str, trips: list[float]) -> None:
        """Prints percentiles of the round trips `trips` (s), exchanges per second and CPU time per exchange."""
        wall_s, cpu_s = time.perf_counter() - self._wall, time.process_time() - self._cpu
        trips.sort()
        p50, p99 = statistics.median(trips) * 1e6, trips[int(len(trips) * 0.99)] * 1e6
        print(
            f"{name:28} round trip p50 {p50:5.0f} us, p99 {p99:5.0f} us   {NUM_MESSAGES / wall_s:7.0f} exchanges/s, "
            f"{cpu_s / NUM_MESSAGES * 1e6:5.1f} us of client CPU each"
        )


def bench_blocking(boot: Boot) -> None:
    """Measures round trips and throughput of the blocking Connection."""
    num_answers = 0

    def take() -> None:
        nonlocal num_answers
        num_answers += sum(isinstance(message, StepOutputs) for message in link.receive())

    with Connection.open(boot, "engine-0.front", EngineToFront) as link:
        link.wait_up(10.0)
        poller = Poller()
        poller.add(link, take)
        trips = []
        for count in range(NUM_TRIPS):
            start = time.perf_counter()
            link.send(Abort([1]))
            while num_answers <= count:
                poller.wait(1.0)
            trips.append(time.perf_counter() - start)
        num_answers = num_sent = 0
        watch = Stopwatch()
        while num_answers < NUM_MESSAGES:
            while num_sent < NUM_MESSAGES and num_sent - num_answers < WINDOW:
                num_sent += link.send(Abort([1]))
            poller.wait(1.0)
        watch.report("blocking", trips)


async def bench_asyncio(boot: Boot, name: str) -> None:
    """The same for AsyncConnection on the running loop."""
    num_answers = 0
    answered = asyncio.Event()

    def take(message: Any) -> None:
        nonlocal num_answers
        if isinstance(message, StepOutputs):
            num_answers += 1
            answered.set()

    link = AsyncConnection.open(boot, "engine-0.front", EngineToFront, take)
    await link.wait_up(10.0)
    trips = []
    for _ in range(NUM_TRIPS):
        start = time.perf_counter()
        answered.clear()
        link.send(Abort([1]))
        await answered.wait()
        trips.append(time.perf_counter() - start)
    num_answers = num_sent = 0
    watch = Stopwatch()
    while num_answers < NUM_MESSAGES:
        while num_sent < NUM_MESSAGES and num_sent - num_answers < WINDOW:
            num_sent += link.send(Abort([1]))
        answered.clear()
        await answered.wait()
    watch.report(name, trips)
    link.close()


async def bench_zmq_asyncio(boot: Boot, name: str) -> None:
    """The same exchange over zmq.asyncio, the alternative that was rejected."""
    from trireme.transport.wire.codec import encode
    from trireme.transport.wire.messages import PROTOCOL_VERSION, Hello

    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"ipc://{boot.run_dir}/engine-0.front")
    hello = Hello(PROTOCOL_VERSION, boot.config_hash, "front", "front-zmq", 0, boot.index)
    encoder, decoder = MessageEncoder(), MessageDecoder(EngineToFront)
    await socket.send(head_of(0, encode(hello)) + encode(hello)[0])
    await socket.recv_multipart()
    sequence = 0

    async def send() -> None:
        nonlocal sequence
        sequence += 1
        frames = encoder.encode(Abort([1]))
        await socket.send(head_of(sequence, frames) + frames[0])

    trips = []
    for _ in range(NUM_TRIPS):
        start = time.perf_counter()
        await send()
        decoder.decode([memoryview((await socket.recv_multipart())[0])[HEAD_BYTES:]])
        trips.append(time.perf_counter() - start)
    num_answers = num_sent = 0
    watch = Stopwatch()
    while num_answers < NUM_MESSAGES:
        while num_sent < NUM_MESSAGES and num_sent - num_answers < WINDOW:
            await send()
            num_sent += 1
        decoder.decode([memoryview((await socket.recv_multipart())[0])[HEAD_BYTES:]])
        num_answers += 1
    watch.report(name, trips)
    socket.close()


def bench_sockets() -> None:
    """Measures the blocking connection, asyncio, uvloop and zmq.asyncio against one server process."""
    import os

    import uvloop

    run_dir = RunDir()
    boot = Boot("front", "front-0", 0, b"", b"", run_dir.path, index=os.getpid())
    server = spawn("trireme.transport.bench", Boot("engine", "engine-0", 0, b"", b"", run_dir.path))
    try:
        bench_blocking(boot)
        for name, factory in (("asyncio", asyncio.new_event_loop), ("uvloop", uvloop.new_event_loop)):
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(bench_asyncio(boot, name))
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(bench_zmq_asyncio(boot, "zmq.asyncio, for comparison"))
    finally:
        server.close()
        run_dir.remove()


if __name__ == "__main__":
    bench_codec()
    bench_sockets()

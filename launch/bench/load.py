"""One load on an HTTP server from streaming clients in this process, and what these see. Called by serve.py and highest_rate.py.

A load point is a number of closed-loop clients, or a rate of open-loop (Poisson) arrivals. Several addresses are one server:
clients are spread over them in turn.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from typing import NamedTuple

from trireme.launch.api.http import Endpoint, ServerError, first_model, stream
from trireme.launch.api.view import ProgressView
from trireme.launch.bench.samples import Sample, make_text
from trireme.transport.wire.messages import Progress

WARM_UP_TOKENS = 8
RATE_S = 20.0  # seconds of arrivals at each rate
_SEEDS_BITS = 20  # of the seeds of one load point; --num-requests is below 2**20


class LoadPoint(NamedTuple):
    """One load: a number of closed-loop clients, or open-loop requests per second."""

    what: str  # clients | rate
    amount: float

    @property
    def name(self) -> str:
        return f"r={self.amount:g}/s" if self.is_open else f"c={self.amount:g}"

    @property
    def is_open(self) -> bool:
        return self.what == "rate"


class Target(NamedTuple):
    """A server under load. All addresses serve `model`."""

    name: str
    addresses: list[Endpoint]
    model: str


class RequestShape(NamedTuple):
    """Lengths of every request, in tokens."""

    input_len: int
    output_len: int


class Workload(NamedTuple):
    """A load point for so many requests; a further `repeat` has other prompts and other arrivals."""

    point: LoadPoint
    shape: RequestShape
    num_requests: int
    repeat: int = 0


class Applied(NamedTuple):
    """What came of a load. `lag_s`: how late the last request of an open loop was sent, of arrivals over `due_s`."""

    samples: list[Sample]
    wall_s: float
    due_s: float = 0.0
    lag_s: float = 0.0

    @property
    def is_late(self) -> bool:
        """The clients themselves could not keep up with the rate, so the server has not seen it."""
        return self.lag_s > 0.5 + 0.05 * self.due_s


async def connect(name: str, addresses: list[Endpoint]) -> Target:
    """The server there, each address warmed up by one short request. Raises ServerError."""
    target = Target(name, addresses, await first_model(addresses[0]))
    await asyncio.gather(*(_one(to, target.model, "warm up", WARM_UP_TOKENS) for to in addresses))
    return target


async def apply(target: Target, load: Workload, view: ProgressView, name: str) -> Applied:
    """Sends the requests, and shows how many have ended under `name` in `view`, which is closed after it. Prompts depend on load
    point and repeat only; arrivals at every rate are those of one random sequence for each repeat, so that rates differ by their
    pace alone."""
    point, shape = load.point, load.shape
    first = zlib.crc32(f"{point.name} {load.repeat}".encode()) << _SEEDS_BITS
    prompts = iter([make_text(shape.input_len, seed) for seed in range(first, first + load.num_requests)])
    samples: list[Sample] = []
    lag_s = moment = 0.0

    def on_done() -> None:
        view.on_progress(Progress(name, "requests", len(samples), load.num_requests))

    async def send(which: int, prompt: str) -> None:
        to = target.addresses[which % len(target.addresses)]
        samples.append(await _one(to, target.model, prompt, shape.output_len))
        on_done()

    async def client(which: int) -> None:
        for prompt in prompts:
            await send(which, prompt)

    async def visitor(which: int, prompt: str, after_s: float) -> None:
        nonlocal lag_s
        await asyncio.sleep(after_s)
        lag_s = time.perf_counter() - begun - after_s
        await send(which, prompt)

    on_done()
    begun = time.perf_counter()
    try:
        if point.is_open:
            chance, visits = random.Random(load.repeat), []
            for which, prompt in enumerate(prompts):
                moment += chance.expovariate(point.amount) if which else 0.0
                visits.append(visitor(which, prompt, moment))
            await asyncio.gather(*visits)
        else:
            await asyncio.gather(*(client(which) for which in range(int(point.amount))))
        return Applied(samples, time.perf_counter() - begun, moment, lag_s)
    finally:
        view.close()


async def _one(to: Endpoint, model: str, prompt: str, max_tokens: int) -> Sample:
    """One streamed completion. A refusal or a broken stream is counted, not raised."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times: list[float] = []
    usage: dict[str, int] = {}
    found = 0, 0
    error = ""
    sent = time.perf_counter()
    try:
        async for event in stream(to, "/v1/completions", body):
            choices = event.get("choices")
            if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
                times.append(time.perf_counter())
            usage = event.get("usage") or usage
        found = usage.get("prompt_tokens", 0), usage.get("completion_tokens", len(times))
    except ServerError as failure:
        error = failure.message
    except (AttributeError, KeyError, TypeError) as failure:  # (events are not validated while times are taken)
        error = f"the server's answer is none of the OpenAI API: {failure}"
    return Sample(sent, tuple(times), *found, error)

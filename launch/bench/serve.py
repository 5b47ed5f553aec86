"""`trireme bench serve` and `bench sweep`: load on an HTTP server from streaming clients, as those clients see it.

A load point is a number of closed-loop clients, or a rate of open-loop (Poisson) arrivals. The server is the one at --url, or a
whole process tree started for the purpose. With --peer each load is applied to both servers in turn, with the same prompts, so
that the ratio holds on a noisy machine. Several comma-separated addresses are one server: clients are spread over them in turn.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.api.deployment import UnderSupervisor
from trireme.launch.api.http import Endpoint, ServerError, endpoint, first_model, stream
from trireme.launch.api.view import ProgressView
from trireme.launch.bench.samples import RunSummary, Sample, make_text, publish, ratio_row, summarize
from trireme.launch.options import Invocation
from trireme.launch.terminal import show
from trireme.resolve import prepare

WARM_UP_TOKENS = 8
RATE_S = 20.0  # seconds of arrivals at each rate
OWN, PEER = "trireme", "peer"


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


def run(invocation: Invocation) -> int:
    """Prints one result per load point, repeat and server, then the ratios."""
    steps = steps_of(invocation.options)
    with _server(invocation) as (server, config):
        servers = {OWN: server}
        if invocation.options["peer"] is not None:
            servers[PEER] = _endpoints(invocation.options["peer"])
        rows, model = asyncio.run(_measure(invocation, servers, steps))
    publish(invocation, model, rows, config)
    return 1 if any(row.figures.get("errors") for row in rows) else 0


@contextmanager
def _server(invocation: Invocation) -> Iterator[tuple[list[Endpoint], EngineConfig | None]]:
    """The server under test; one started here is stopped at the end."""
    config = invocation.loaded.config
    key = config.serving.api_key[0] if config.serving.api_key else ""
    if invocation.options["url"] is not None:
        yield _endpoints(invocation.options["url"], key), None
        return
    serving = msgspec.structs.replace(config.serving, port=0)
    config = msgspec.structs.replace(config, serving=serving)
    if "launch.log_level" not in invocation.loaded.sources:
        config = msgspec.structs.replace(config, launch=msgspec.structs.replace(config.launch, log_level="warning"))
    resolved = prepare(config).config
    view = ProgressView()
    deployment = UnderSupervisor(resolved, view.on_progress, num_fronts=resolved.serving.api_servers)
    try:
        deployment.start()
        view.close()
        assert deployment.address is not None
        host, port = deployment.address
        yield [Endpoint(host, port, False, "", key)], resolved
    finally:
        view.close()
        deployment.close()


def _endpoints(urls: str, key: str = "") -> list[Endpoint]:
    return [endpoint(url, key) for url in urls.split(",")]


async def _measure(
    invocation: Invocation, servers: dict[str, list[Endpoint]], steps: list[LoadPoint]
) -> tuple[list[RunSummary], str]:
    options = invocation.options
    models = {name: await first_model(to[0]) for name, to in servers.items()}
    for name, to in servers.items():
        await asyncio.gather(*(_one(one, models[name], "warm up", WARM_UP_TOKENS) for one in to))
    rows: list[RunSummary] = []
    ratios: list[RunSummary] = []
    for step in steps:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for repeat in range(options["repeats"]):
            order = list(servers) if repeat % 2 == 0 else list(servers)[::-1]  # alternate which server is first
            for name in order:
                figures = {step.what: step.amount, **await _load(servers[name], models[name], options, step, repeat)}
                found[name].append(figures)
                shown = f"{name} {step.name}" if len(servers) > 1 else step.name
                rows.append(RunSummary(shown, figures, name))
        if len(servers) > 1:
            pairs = list(zip(found[OWN], found[PEER], strict=True))
            ratios.append(ratio_row(f"{OWN} / {PEER} {step.name}", pairs))
    return [*rows, *ratios], models[OWN]


def steps_of(options: dict[str, Any]) -> list[LoadPoint]:
    """The load points that the flags ask for. Raises ConfigError."""
    what = "rate" if options.get("rate") else "concurrency"
    words = options[what]
    try:
        amounts = [float(word) if what == "rate" else int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"--{what} is {','.join(words)!r}; it must be numbers") from error
    if not all(0 < amount < 1e6 for amount in amounts):
        raise ConfigError(f"--{what} is {','.join(words)!r}; each must be above 0")
    return [LoadPoint("rate" if what == "rate" else "clients", float(amount)) for amount in amounts]


async def _load(
    to: list[Endpoint], model: str, options: dict[str, Any], step: LoadPoint, repeat: int
) -> dict[str, float]:
    """Applies one load point to a server; the prompts depend on load point and repeat only."""
    count = options["num_requests"] or (max(4, round(RATE_S * step.amount)) if step.is_open else round(3 * step.amount))
    first = repeat * 1_000_000 + round(step.amount * 1000)
    prompts = iter([make_text(options["input_len"], seed) for seed in range(first, first + count)])
    samples: list[Sample] = []

    async def client(which: int) -> None:
        for prompt in prompts:
            samples.append(await _one(to[which % len(to)], model, prompt, options["output_len"]))

    async def visitor(which: int, prompt: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        samples.append(await _one(to[which % len(to)], model, prompt, options["output_len"]))

    begun = time.perf_counter()
    if step.is_open:
        chance, moment, visits = random.Random(first), 0.0, []
        for which, prompt in enumerate(prompts):
            visits.append(visitor(which, prompt, moment))
            moment += chance.expovariate(step.amount)
        await asyncio.gather(*visits)
    else:
        await asyncio.gather(*(client(which) for which in range(int(step.amount))))
    wall_s = time.perf_counter() - begun
    for error, times in Counter(sample.error for sample in samples if sample.error).items():
        show(f"{times} x {error}", to=sys.stderr)
    return summarize(samples, wall_s)


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

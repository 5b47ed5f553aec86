"""`trireme bench serve`: closed loops of streaming HTTP clients against a server, and what those clients see.

The server is the one at --url, or the whole process tree started for the purpose. With --peer each load is put on both
servers in turn, with the same prompts, so that the ratio holds on a noisy machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from launch.bench import Row, Sample, make_text, publish, summarize
from launch.deployment import UnderSupervisor
from launch.http import Endpoint, ServerError, endpoint, get_json, stream
from launch.options import Invocation
from launch.view import ProgressView
from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.resolve import prepare

WARM_UP_TOKENS = 8


def run(invocation: Invocation) -> int:
    """Prints one row per concurrency, repeat and server."""
    counts = _counts(invocation.options["concurrency"])
    with _server(invocation) as (server, config):
        servers = {"trireme" if invocation.options["peer"] else "": server}
        if invocation.options["peer"]:
            servers["peer"] = endpoint(invocation.options["peer"])
        rows, model = asyncio.run(_measure(invocation, servers, counts))
    publish(invocation, model, rows, config)
    return 1 if any(row.figures["errors"] for row in rows) else 0


@contextmanager
def _server(invocation: Invocation) -> Iterator[tuple[Endpoint, EngineConfig | None]]:
    """The server under test; one of our own is stopped at the end."""
    config = invocation.loaded.config
    key = config.serving.api_key[0] if config.serving.api_key else ""
    if invocation.options["url"]:
        yield endpoint(invocation.options["url"], key), None
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
        yield Endpoint(host, port, False, "", key), resolved
    finally:
        view.close()
        deployment.close()


async def _measure(invocation: Invocation, servers: dict[str, Endpoint], counts: list[int]) -> tuple[list[Row], str]:
    options = invocation.options
    models = {name: str((await get_json(to, "/v1/models"))["data"][0]["id"]) for name, to in servers.items()}
    for name, to in servers.items():
        await _one(to, models[name], "warm up", WARM_UP_TOKENS)
    rows = []
    for concurrency in counts:
        for repeat in range(options["repeats"]):
            for name, to in servers.items():
                figures = await _closed_loops(to, models[name], options, concurrency, repeat)
                rows.append(Row(f"{name} c={concurrency}".strip(), figures))
    return rows, next(iter(models.values()))


def _counts(words: tuple[str, ...]) -> list[int]:
    try:
        counts = [int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"--concurrency is {','.join(words)!r}; it must be whole numbers") from error
    if min(counts) < 1:
        raise ConfigError(f"--concurrency is {','.join(words)!r}; each must be at least 1")
    return counts


async def _closed_loops(
    to: Endpoint, model: str, options: dict[str, Any], concurrency: int, repeat: int
) -> dict[str, float]:
    """`concurrency` clients that each send their next request when the last one has ended."""
    count = options["num_requests"] or 3 * concurrency
    seeds = iter(range(repeat * 1_000_000 + concurrency * 1000, repeat * 1_000_000 + concurrency * 1000 + count))
    samples: list[Sample] = []

    async def client() -> None:
        for seed in seeds:
            samples.append(await _one(to, model, make_text(options["input_len"], seed), options["output_len"]))

    begun = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s = time.perf_counter() - begun
    for error, times in Counter(sample.error for sample in samples if sample.error).items():
        print(f"{times} x {error}", file=sys.stderr)
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
    error = ""
    sent = time.perf_counter()
    try:
        async for event in stream(to, "/v1/completions", body):
            choices = event.get("choices")
            if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
                times.append(time.perf_counter())
            usage = event.get("usage") or usage
    except ServerError as failure:
        error = failure.message
    return Sample(sent, tuple(times), usage.get("prompt_tokens", 0), usage.get("completion_tokens", len(times)), error)

"""`trireme bench serve` and `bench sweep`: given loads on an HTTP server, or the highest rate at which it keeps its objectives.

The server is the one at --url, or a whole process tree started for the purpose. With --peer each load is applied to both servers
in turn, with the same prompts, so that the ratio holds on a noisy machine. How load is made: launch/bench/load.py; the search:
launch/bench/highest_rate.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.api.deployment import UnderSupervisor
from trireme.launch.api.http import Endpoint, endpoint
from trireme.launch.api.view import ProgressView
from trireme.launch.bench.highest_rate import HIGHEST_RATE, Found, Goal, find_highest
from trireme.launch.bench.load import RATE_S, LoadPoint, RequestShape, Workload, apply, connect
from trireme.launch.bench.samples import RunSummary, publish, ratio_row, report_errors, summarize
from trireme.launch.bench.slo import EXAMPLE, Slo, parse_slo
from trireme.launch.options import ATTAINMENT, Invocation
from trireme.launch.terminal import show
from trireme.resolve import prepare

CONCURRENCY = ("1", "2", "4", "8", "16", "32")  # steps of a sweep for which none are given
OWN, PEER = "trireme", "peer"


def run(invocation: Invocation) -> int:
    """Prints one result per load point, repeat and server, then the ratios; or what a search for the highest rate finds."""
    options = invocation.options
    slo, steps = parse_slo(options["slo"]), steps_of(options)
    goal = _goal(slo, options)
    with _server(invocation) as (server, config):
        servers = {OWN: server}
        if options["peer"] is not None:
            servers[PEER] = _endpoints(options["peer"])
        if goal is None:
            rows, model = asyncio.run(_measure(options, servers, steps, slo))
        else:
            found, model = asyncio.run(_search(options, servers, goal))
    if goal is not None:
        return _publish_search(invocation, found, model, config)
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
    options: dict[str, Any], servers: dict[str, list[Endpoint]], steps: list[LoadPoint], slo: Slo | None
) -> tuple[list[RunSummary], str]:
    shape = RequestShape(options["input_len"], options["output_len"])
    targets = [await connect(name, to) for name, to in servers.items()]
    rows: list[RunSummary] = []
    ratios: list[RunSummary] = []
    for step in steps:
        count = options["num_requests"] or _default_count(step)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for repeat in range(options["repeats"]):
            for target in targets if repeat % 2 == 0 else targets[::-1]:  # alternate which server is first
                shown = f"{target.name} {step.name}" if len(servers) > 1 else step.name
                applied = await apply(target, Workload(step, shape, count, repeat), ProgressView(), shown)
                report_errors(applied.samples)
                figures = {step.what: step.amount, **summarize(applied.samples, applied.wall_s, slo)}
                found[target.name].append(figures)
                rows.append(RunSummary(shown, figures, target.name))
        if len(servers) > 1:
            pairs = list(zip(found[OWN], found[PEER], strict=True))
            ratios.append(ratio_row(f"{OWN} / {PEER} {step.name}", pairs))
    return [*rows, *ratios], targets[0].model


def _default_count(step: LoadPoint) -> int:
    return max(4, round(RATE_S * step.amount)) if step.is_open else round(3 * step.amount)


# ---------------------------------------------------------------- search


def _goal(slo: Slo | None, options: dict[str, Any]) -> Goal | None:
    """What to search the highest rate for; None when load points are given, or no objectives. Raises ConfigError."""
    rates = options.get("rate", ())
    if slo is not None and not options["concurrency"] and len(rates) < 2:
        if rates and float(rates[0]) > HIGHEST_RATE:
            raise ConfigError(f"--rate is {rates[0]}; a search starts at {HIGHEST_RATE:g} at most")
        return Goal(slo, options["attainment"])
    if options.get("attainment", ATTAINMENT.default) != ATTAINMENT.default:
        raise ConfigError(
            "--attainment is of a search for the highest rate, which needs --slo and at most one --rate",
            hint=f"{EXAMPLE} --attainment {options['attainment']:g}",
        )
    return None


async def _search(
    options: dict[str, Any], servers: dict[str, list[Endpoint]], goal: Goal
) -> tuple[dict[str, Found], str]:
    """The servers one after the other: rates that only one of them is asked for have no pair."""
    targets = [await connect(name, to) for name, to in servers.items()]
    found = {}
    for target in targets:
        prefix = f"{target.name} " if len(servers) > 1 else ""
        found[target.name] = await find_highest(target, goal, options, prefix=prefix)
    return found, targets[0].model


def _publish_search(invocation: Invocation, found: dict[str, Found], model: str, config: EngineConfig | None) -> int:
    """The rates tried as rows, then a line for each server with its highest one."""
    rows = [row for one in found.values() for row in one.rows]
    publish(invocation, model, rows, config, highest_rate={name: one.rate for name, one in found.items()})
    for name, one in found.items():
        show(
            f"{name}: {one.conclusion}" if len(found) > 1 else one.conclusion,
            to=sys.stderr if invocation.options["json"] else None,
        )
    return 0 if all(one.rate for one in found.values()) else 1


# ---------------------------------------------------------------- load points


def steps_of(options: dict[str, Any]) -> list[LoadPoint]:
    """The load points that the flags ask for. Raises ConfigError."""
    what = "rate" if options.get("rate") else "concurrency"
    words = options[what] or CONCURRENCY
    try:
        amounts = [float(word) if what == "rate" else int(word) for word in words]
    except ValueError as error:
        raise ConfigError(f"--{what} is {','.join(words)!r}; it must be numbers") from error
    if not all(0 < amount < 1e6 for amount in amounts):
        raise ConfigError(f"--{what} is {','.join(words)!r}; each must be above 0")
    return [LoadPoint("rate" if what == "rate" else "clients", float(amount)) for amount in amounts]

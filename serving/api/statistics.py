"""Numbers: /metrics for Prometheus and /load for external load balancers. Asks the engines, for half a second at most."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trireme import __version__
from trireme.errors import TriremeError
from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.middleware import send_body
from trireme.serving.metrics.telemetry import CONTENT_TYPE, merged, page

STATISTICS_TIMEOUT_S = 0.5

_encode = msgspec.json.encode


async def load(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """For external load balancers: the load of the engines behind this address and their capacity."""
    loads = await front.client.loads(STATISTICS_TIMEOUT_S)
    answer = {
        "status": front.readiness().phase,
        "num_rows": front.client.num_choices,
        "capacity": front.client.capacity,
        "engines": [{"engine": engine, **load} for engine, load in sorted(loads.items())],
    }
    await send_body(send, 200, _encode(answer))


async def metrics(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Prometheus text: the sum over all front ends, and each engine's counters over all its lives."""
    engines = front.client.states()

    async def ask(engine: int) -> dict[str, Any]:
        try:
            found = await front.client.call(engine, "stats", timeout_s=STATISTICS_TIMEOUT_S)
        except (TriremeError, TimeoutError):
            return {}
        return found if isinstance(found, dict) else {}

    snapshots, *answers = await asyncio.gather(
        front.snapshots(), *(ask(state.engine) for state in engines if state.is_up)
    )
    known = dict(zip((state.engine for state in engines if state.is_up), answers, strict=True))
    totals = front.shared.totals
    statistics = {state.engine: totals.over_lives(state.engine, known.get(state.engine, {})) for state in engines}
    build = {"version": __version__, "model": front.model.name}
    text = page(merged(snapshots), engines, statistics, build)
    await send_body(send, 200, text, kind=CONTENT_TYPE)


ROUTES = (
    ApiRoute("GET", "/metrics", metrics),
    ApiRoute("GET", "/load", load),
)

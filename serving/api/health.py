"""Probes: whether this process lives, whether it can answer, and which version it is. Never waits for an engine."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trireme import __version__
from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.middleware import send_body

_encode = msgspec.json.encode


async def alive(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, b'{"status":"alive"}')


async def ready(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """200 when a request sent now would be answered, else 503 with the start-up progress."""
    readiness = front.readiness()
    answer: dict[str, Any] = {
        "status": readiness.phase,
        "engines": [
            {
                "engine": state.engine,
                "up": state.is_up,
                "epoch": state.epoch,
                "rows": state.num_rows,
                "stalled": state.stalled,
                "reason": state.reason,
            }
            for state in readiness.engines
        ],
    }
    if front.progress and not readiness.can_answer:
        answer["progress"] = [{"source": source, **phase} for source, phase in front.progress.items()]
    await send_body(send, 200 if readiness.can_answer else 503, _encode(answer))


async def startup(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    phase = front.readiness().phase
    await send_body(send, 503 if phase == "loading" else 200, _encode({"status": phase}))


async def version(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, _encode({"version": __version__}))


ROUTES = (
    ApiRoute("GET", "/health", alive),
    ApiRoute("GET", "/live", alive),
    ApiRoute("GET", "/ready", ready),
    ApiRoute("GET", "/startup", startup),
    ApiRoute("GET", "/version", version),
)

"""Answers of generating routes: submits the choices of an admitted request and writes the answer, streamed or whole.

Used by every API module that generates. Knows no wire format: the bytes come from a serving.http.sse.Format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from starlette.types import Scope, Send

from trireme.errors import RequestError
from trireme.params import SamplingParams
from trireme.serving.engines.replay import Replay
from trireme.serving.front import Admitted, Front
from trireme.serving.http.sse import FIRST_EVENT_S, EventStream, Format, Outcome
from trireme.serving.text.generation import Generation
from trireme.topology.zones import MAX_LABEL

Headers = list[tuple[bytes, bytes]]


class Delivery(NamedTuple):
    """How an answer is sent. `echoed`: the prompt is shown before the text."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echoed: bool = False


async def answer(
    admitted: Admitted[Any],
    send: Send,
    rows: Sequence[Replay],
    params: SamplingParams,
    format_of: Callable[[Generation], Format],
    delivery: Delivery,
    *,
    route: str,
) -> None:
    """Submits `rows` and answers. Counts the request under `route` once in and once out, whatever happens. Raises OverloadedError,
    EngineDeadError and RequestError before the first byte."""
    front, caller, scope = admitted.front, admitted.caller, admitted.scope
    pin, label = _pin(scope), _label(scope)
    front.admit_choices(len(rows), sum(len(row.prompt) for row in rows), rows[0].priority)
    generation = Generation(front.client, front.table, rows, params, echoed=delivery.echoed)
    form = format_of(generation)
    front.telemetry.received(route, generation, len(rows))
    front.admission.charge(caller, generation.usage().prompt_tokens)
    headers = [*admitted.headers, *front.admission.headers(caller)]
    outcome: Outcome = "error"
    stream = EventStream(scope, admitted.receive, send, generation)
    try:
        with front.choices.coming(len(rows)):
            await stream.submit(pin=pin, label=label)
        outcome = await _deliver(front, stream, form, delivery, headers)
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        front.ticker.streams.discard(stream)
        stream.close()
        front.choices.tell()
        front.telemetry.ended(outcome, generation)
        front.admission.charge(caller, generation.usage().completion_tokens)


async def _deliver(front: Front, stream: EventStream, form: Format, delivery: Delivery, headers: Headers) -> Outcome:
    """Writes the answer of a submitted request."""
    if stream.has_left():
        return "cancelled"
    generation = stream.generation
    deltas = await stream.first()
    if wait_s := generation.queued_s or (FIRST_EVENT_S if deltas == [] else 0.0):
        front.admission.waited(wait_s, front.choices.in_flight())
    if delivery.stream:
        front.ticker.streams.add(stream)
        return await stream.run(
            form,
            deltas,
            headers,
            include_usage=delivery.include_usage,
            continuous_usage=delivery.continuous_usage,
        )
    while deltas is not None:
        for delta in deltas:
            form.add(delta)
        batch = await generation.next()
        deltas = batch[0] if batch is not None else None
    if stream.has_left():
        return "cancelled"
    front.ticker.streams.add(stream)
    return await stream.write_whole(form.whole(generation), headers)


def _pin(scope: Scope) -> int:
    """Engine demanded by X-data-parallel-rank, or -1."""
    for name, value in scope["headers"]:
        if name == b"x-data-parallel-rank":
            if not value.isdigit() or len(value) > 6:
                raise RequestError("X-data-parallel-rank must be the number of an engine", param="x-data-parallel-rank")
            return int(value)
    return -1


def _label(scope: Scope) -> str:
    """Zone named by X-Trireme-Label, or nothing."""
    for name, value in scope["headers"]:
        if name == b"x-trireme-label":
            if len(value) > MAX_LABEL or not value.isascii():
                raise RequestError(
                    f"X-Trireme-Label must name a zone in at most {MAX_LABEL} ASCII characters", param="x-trireme-label"
                )
            return str(value, "ascii")
    return ""

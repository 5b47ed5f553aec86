"""Routes that change what the engines of a running server do: sleep and wake, pause and resume. Each answers once that is done.

serving/http/middleware.py admits only admin keys to the paths in ADMIN. Arguments are in the query, as in vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from trireme.errors import DeadlineError, EngineDeadError, EngineError, RequestError
from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.middleware import send_body
from trireme.sleep import LEVELS, NO_SLEEP, RESTING
from trireme.topology.lockstep import PAUSES, Mode

ADMIN = frozenset(("/sleep", "/wake_up", "/pause", "/resume"))
REST_S = 300.0  # limit for entering sleep, waking or a pause
STATE_S = 5.0
MAX_QUERY = 1024
WHOLE = frozenset(("weights", "kv_cache"))  # wake together only


class NotNowError(EngineError):
    """An engine says why it cannot do it as things are."""

    status = 409
    code = "not_now"


class NotHereError(RequestError):
    """No engine of this server ever could."""

    status = 501
    code = "not_implemented"


async def sleep(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Puts every engine to sleep at `level` 1 or 2. Raises RequestError, NotHereError (501), NotNowError (409), DeadlineError."""
    asked = _query(scope, ("level",))
    level = asked.get("level", "1")
    if level not in map(str, LEVELS):
        levels = "1 keeps the weights in the host's memory, 2 drops them"
        raise RequestError(f"level is {level[:20]!r}; {levels}", param="level")
    if front.config.parallel.worker_kind == "torch":
        raise NotHereError(NO_SLEEP)
    try:
        await _all(front, "sleep", level=int(level))
    except EngineDeadError:
        raise
    except EngineError as error:
        raise NotNowError(error.message) from error
    await is_sleeping(front, scope, receive, send)


async def wake_up(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Wakes every engine. Raises RequestError for `tags` that would wake a part only, and DeadlineError."""
    tags = _query(scope, ("tags",), may_repeat=True).get("tags")
    if tags is not None and set(tags.split(",")) != WHOLE:
        raise RequestError(f"tags are {tags[:40]!r}; weights and kv_cache wake together: leave them out", param="tags")
    await _all(front, "wake")
    await is_sleeping(front, scope, receive, send)


async def is_sleeping(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    states = await _states(front)
    body = {"is_sleeping": all(state["state"] == "asleep" for state in states), "engines": states}
    await send_body(send, 200, msgspec.json.encode(body))


async def pause(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Pauses every engine; `mode` is one of PAUSES. Raises RequestError, NotNowError (409), DeadlineError."""
    asked = _query(scope, ("mode",)).get("mode", "wait")
    mode: Mode | None = next((mode for mode in PAUSES if mode == asked), None)
    if mode is None:
        raise RequestError(f"mode is {asked[:20]!r}; there are {', '.join(PAUSES)}", param="mode")
    await _directed(front, mode)
    await is_paused(front, scope, receive, send)


async def resume(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    _query(scope, ())
    await _directed(front, "")
    await is_paused(front, scope, receive, send)


async def is_paused(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    states = await _states(front)
    body = {"is_paused": all(state["pause"] for state in states), "engines": states}
    await send_body(send, 200, msgspec.json.encode(body))


def _query(scope: Scope, known: Iterable[str], *, may_repeat: bool = False) -> dict[str, str]:
    """The arguments by name; repeated ones are joined by commas where `may_repeat`. Raises RequestError for unknown ones."""
    text = scope["query_string"]
    found: dict[str, str] = {}
    if len(text) > MAX_QUERY:
        raise RequestError(f"the query has {len(text)} bytes; the limit is {MAX_QUERY}")
    for name, value in parse_qsl(text.decode("latin-1"), keep_blank_values=True):
        if name not in known:
            there_is = ", ".join(known) or "none"
            raise RequestError(f"{scope['path']} has no argument {name[:40]!r}; there is {there_is}", param=name[:40])
        if name in found and not may_repeat:
            raise RequestError(f"{name} is given twice", param=name)
        found[name] = f"{found[name]},{value}" if name in found else value
    return found


async def _states(front: Front) -> list[dict[str, Any]]:
    """Sleep and pause state of each engine. Raises EngineDeadError while one is down."""
    engines = [state.engine for state in front.client.states()]
    stats = await _bounded(asyncio.gather(*(front.client.call(engine, "stats") for engine in engines)), STATE_S)
    pairs = zip(engines, stats, strict=True)
    return [{"engine": engine, **{name: found[name] for name in RESTING}} for engine, found in pairs]


async def _all(front: Front, method: str, **args: Any) -> None:
    """Calls `method` on every engine; an engine that fails does not stop the others. Raises the first failure."""
    engines = [state.engine for state in front.client.states()]
    calls = (front.client.call(engine, method, timeout_s=REST_S, **args) for engine in engines)
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for engine, answer in zip(engines, answers, strict=True):
        if isinstance(answer, TimeoutError):
            raise DeadlineError(f"engine {engine} has not done it after {REST_S:g} s")
        if isinstance(answer, BaseException):
            raise answer


async def _directed(front: Front, mode: Mode) -> None:
    try:
        await _bounded(front.client.direct(mode, REST_S), REST_S)
    except EngineDeadError:
        raise
    except EngineError as error:
        raise NotNowError(error.message) from error


async def _bounded(doing: Awaitable[Any], limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await doing
    except TimeoutError:
        raise DeadlineError(f"not done after {limit_s:g} s") from None


ROUTES = (
    ApiRoute("POST", "/sleep", sleep),
    ApiRoute("POST", "/wake_up", wake_up),
    ApiRoute("GET", "/is_sleeping", is_sleeping),
    ApiRoute("POST", "/pause", pause),
    ApiRoute("POST", "/resume", resume),
    ApiRoute("GET", "/is_paused", is_paused),
)

"""`trireme control`: puts a running server to sleep, wakes, pauses or resumes it, or only reports its state.

Without --url it is this user's only server on this machine, over its own sockets; with it any server, by its admin key.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from trireme.errors import ConfigError
from trireme.launch.api.client import AsyncClient
from trireme.launch.api.http import Endpoint, ServerError, endpoint, get_json, post_json
from trireme.launch.options import Invocation
from trireme.launch.terminal import show
from trireme.sleep import LEVELS
from trireme.topology.lockstep import PAUSES, pause_mode

ROUTES = {"sleep": "/sleep?level={level}", "wake": "/wake_up", "pause": "/pause?mode={mode}", "resume": "/resume"}
ACTIONS = (*ROUTES, "state")


def run(invocation: Invocation) -> int:
    """Prints the resulting sleep state of each engine."""
    options, keys = invocation.options, invocation.loaded.config.serving.admin_key
    action, level, mode = options["action"], options["level"], options["mode"]
    checks = [("ACTION", action, ACTIONS), ("--level", level, LEVELS), ("--mode", mode, PAUSES)]
    for name, value, known in checks:
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(map(str, known))}")
    if options["url"] is not None:
        found = asyncio.run(_by_http(endpoint(options["url"], keys[0] if keys else ""), action, level, mode))
    else:
        found = asyncio.run(_by_sockets(options["dir"], action, level, mode))
    show(json.dumps(found, indent=1) if options["json"] else "\n".join(map(_line, found)))
    return 0


def _line(engine: dict[str, Any]) -> str:
    level = f" (level {engine['sleep_level']})" if engine["sleep_level"] else ""
    pause = f", paused ({engine['pause']})" if engine["pause"] else ""
    return f"engine {engine['engine']}  {engine['state']}{level}{pause}"


async def _by_http(to: Endpoint, action: str, level: int, mode: str) -> list[dict[str, Any]]:
    if action in ROUTES:
        await post_json(to, ROUTES[action].format(level=level, mode=mode))
    found = await get_json(to, "/is_sleeping")
    try:
        return msgspec.to_builtins(msgspec.convert(found, _SleepReport).engines)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise ServerError(f"what answers at {to.url} does not say how its engines sleep: {error}") from error


class _Engine(msgspec.Struct):
    engine: int
    state: str
    sleep_level: int
    pause: str


class _SleepReport(msgspec.Struct):
    engines: list[_Engine]


async def _by_sockets(directory: str | None, action: str, level: int, mode: str) -> list[dict[str, Any]]:
    async with AsyncClient(directory) as client:
        match action:
            case "sleep":
                await client.sleep(level)
            case "wake":
                await client.wake()
            case "pause":
                await client.pause(pause_mode(mode))
            case "resume":
                await client.resume()
        return await client.resting()

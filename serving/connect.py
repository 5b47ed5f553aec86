"""Makes the EngineClient of a process that talks to its deployment over sockets: a front end, or the Python API.

Apart from serving/main.py, so that nobody needs the HTTP framework for it.
"""

from __future__ import annotations

from typing import Any

from serving.client import Connect, EngineClient
from transport.aio import AsyncConnection
from transport.messages import Boot, EngineToFront, FromCoordinator
from trireme.config import EngineConfig
from trireme.fleet import front_label


def client_over_sockets(boot: Boot, config: EngineConfig) -> EngineClient:
    """One link per engine, one to the coordinator when there are several engines. Links open when the client starts."""

    def over(name: str, accepts: Any) -> Connect:
        return lambda on_message: AsyncConnection.open(boot, name, accepts, on_message)

    engines = [over(f"engine-{index}.front", EngineToFront) for index in range(config.parallel.dp)]
    return EngineClient(
        engines,
        over("coordinator", FromCoordinator) if config.parallel.dp > 1 else None,
        migration_limit=config.serving.migration_limit,
        engine_wait_s=config.serving.engine_wait,
        label=front_label(config, boot.index) if boot.role == "front" else "",
        tells_prefix=config.routes_by_prefix,
    )

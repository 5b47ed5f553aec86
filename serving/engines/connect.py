"""Makes the EngineClient of a process that talks to its deployment over sockets: a frontend, or the Python API.

Apart from serving/main.py, so that nobody needs the HTTP framework for it.
"""

from __future__ import annotations

from typing import Any

from trireme.config import EngineConfig
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.engine import Connect
from trireme.topology.zones import engines_of_front, front_label
from trireme.transport.sockets.aio import AsyncConnection
from trireme.transport.wire.messages import Boot, EngineToFront, FromCoordinator


def client_over_sockets(boot: Boot, config: EngineConfig) -> EngineClient:
    """One link per engine, one to the coordinator when there are several engines. Links open when the client starts."""

    def over(name: str, accepts: Any) -> Connect:
        return lambda on_message: AsyncConnection.open(boot, name, accepts, on_message)

    is_front = boot.name == f"front-{boot.index}"  # not a client of the Python API, which reaches all engines
    mine = engines_of_front(config, boot.index) if is_front else range(config.parallel.dp)
    engines = [over(f"engine-{index}.front", EngineToFront) for index in mine]
    return EngineClient(
        engines,
        over("coordinator", FromCoordinator) if config.parallel.dp > 1 else None,
        migration_limit=config.serving.migration_limit,
        engine_wait_s=config.serving.engine_wait,
        in_lockstep=config.in_lockstep,
        label=front_label(config, boot.index) if is_front else "",
        tells_prefix=config.routes_by_prefix,
        first_engine=mine.start,
    )

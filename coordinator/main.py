"""The coordinator's process: one socket, one loop; shell.CoordinatorShell does the rest.

Started by launch/processes/supervisor.py when there are several engines. Engines send Load, frontends Route and Released; every
frontend gets a View when something has changed. May be killed at any moment: no other process depends on its memory.
"""

from __future__ import annotations

import random

import msgspec

from trireme.config import EngineConfig
from trireme.coordinator.core import Coordinator
from trireme.coordinator.shell import CoordinatorShell
from trireme.log import configure
from trireme.topology.zones import fleet_of
from trireme.transport.process.boot import BootChannel
from trireme.transport.sockets.names import Poller, Server
from trireme.transport.wire.messages import ToCoordinator


def main(channel: BootChannel) -> None:
    """Entry of the child process."""
    boot = channel.boot
    config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
    configure(boot.name, level=config.launch.log_level, form=config.launch.log_format)
    core = Coordinator(
        config.parallel.dp,
        config.coordinator.balance,
        random.Random(),
        epoch=boot.epoch,
        fleet=fleet_of(config),
        block_size=config.cache.block_size,
        steals_for=config.scheduler.num_rows if config.coordinator.work_stealing else 0,
        in_lockstep=config.in_lockstep,
    )
    with Server.open(boot, "coordinator", ToCoordinator) as server:
        shell = CoordinatorShell(core, server)
        orders: list[object] = []
        poller = Poller()
        poller.add(server, shell.on_messages)
        poller.add(channel, lambda: orders.extend(channel.receive()))
        channel.ready()
        while not orders:
            wait_s = shell.turn()
            channel.beat(shell.num_routed)
            poller.wait(wait_s)

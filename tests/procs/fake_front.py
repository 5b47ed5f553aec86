"""A front end without HTTP, for tests of the supervisor: answers every TCP connection with its state as JSON."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.procs.fake_engine import order_for
from trireme.config import EngineConfig
from trireme.transport.process.boot import BootChannel
from trireme.transport.sockets.names import Connection, Poller
from trireme.transport.wire.messages import EngineToFront, FromCoordinator, View


class Listener:
    """The inherited socket as a Source."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.socket.setblocking(False)

    def poll_targets(self) -> tuple[int]:
        return (self.socket.fileno(),)

    def acknowledge(self) -> bool:
        return False

    def tick(self, now: float) -> float:
        return float("inf")


def main(channel: BootChannel) -> None:
    boot = channel.boot
    config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
    directory = Path(config.model.model)
    (directory / f"{boot.name}.{boot.epoch}.pid").write_text(str(os.getpid()))
    state: dict[str, Any] = {"name": boot.name, "epoch": boot.epoch, "view": None}
    poller = Poller()
    links = [Connection.open(boot, f"engine-{i}.front", EngineToFront) for i in range(config.parallel.dp)]
    coordinator = Connection.open(boot, "coordinator", FromCoordinator) if config.parallel.dp > 1 else None
    listener = Listener(boot.listen_fd)

    def on_coordinator() -> None:
        for message in coordinator.receive() if coordinator else ():
            if isinstance(message, View):
                state["view"] = [(m.epoch, m.state) for m in message.members]

    def on_connection() -> None:
        try:
            connection, _ = listener.socket.accept()
        except BlockingIOError:
            return
        with connection:
            up = [link.welcome.epoch if link.welcome else -1 for link in links]
            coordinated = coordinator.welcome.epoch if coordinator and coordinator.welcome else -1
            connection.sendall(msgspec.json.encode({**state, "engines": up, "coordinator": coordinated}))

    for link in links:
        poller.add(link, lambda link=link: list(link.receive()) and None)
    if coordinator:
        poller.add(coordinator, on_coordinator)
    poller.add(listener, on_connection)
    poller.add(channel, lambda: None)
    while not all(link.is_up for link in links):
        poller.wait(0.1)
    channel.ready()
    while not (drains := channel.receive()):
        poller.wait(1.0)
    (directory / f"{boot.name}.drain").write_text(f"{drains[0].deadline_s} {drains[0].notice_s}")
    if order_for(directory, boot.name) == "drain slowly":
        time.sleep(1000)

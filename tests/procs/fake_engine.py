"""An engine core without an engine, for tests of the supervisor: a worker child, a front socket, beats and Load reports.

The directory named as config.model.model steers it: `engine-0.order` says what to do, `engine-0.EPOCH.pid` tells its pid.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ModelError
from trireme.transport.process.boot import BootChannel, spawn
from trireme.transport.sockets.names import Connection, Poller, Server
from trireme.transport.wire.columns import pack, pack_ids
from trireme.transport.wire.messages import Boot, EngineFacts, FromCoordinator, FrontToEngine, Load, StepOutputs, Submit


def order_for(directory: Path, name: str) -> str:
    path = directory / f"{name}.order"
    return path.read_text() if path.exists() else ""


def main(channel: BootChannel) -> None:
    boot = channel.boot
    config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
    directory = Path(config.model.model)
    (directory / f"{boot.name}.{boot.epoch}.pid").write_text(str(os.getpid()))
    worker_boot = Boot("worker", f"{boot.name}.worker-0", 0, b'{"do": "work"}', boot.config_hash, boot.run_dir)
    worker = spawn("tests.procs.fake_child", worker_boot)
    channel.progress("load", 1, 2)
    match order_for(directory, boot.name):
        case "fail":
            raise ModelError("model.gguf is cut off at byte 17", hint="download it again")
        case "fail again" if boot.epoch > 0:
            raise ModelError("out of memory")
        case "hang":
            time.sleep(1000)
    while not worker.is_ready:
        worker.receive()
        time.sleep(0.01)
    run(channel, boot, config)


def run(channel: BootChannel, boot: Boot, config: EngineConfig) -> None:
    poller = Poller()
    server = Server.open(
        boot, f"engine-{boot.index}.front", FrontToEngine, facts=EngineFacts(boot.index, 9, 9, 9, 9, 9, 9, 9)
    )

    def on_front() -> None:
        for peer, message in server.receive():
            if isinstance(message, Submit):
                server.send(
                    peer, StepOutputs(boot.index, 1, pack_ids([message.rid]), pack([int(message.prompt.sum())]))
                )

    poller.add(server, on_front)
    poller.add(channel, lambda: None)
    coordinator = Connection.open(boot, "coordinator", FromCoordinator) if config.parallel.dp > 1 else None
    if coordinator is not None:
        poller.add(coordinator, lambda: list(coordinator.receive()) and None)
    channel.ready({"pid": os.getpid()})
    seq = 0
    while not channel.receive():
        seq += 1
        channel.beat(seq)
        if coordinator is not None:
            coordinator.send(Load(boot.index, boot.epoch, seq, seq, 0, 0, 0, 0, 0, 9, 0.0, {}, 0))
        poller.wait(0.1)
    server.close()

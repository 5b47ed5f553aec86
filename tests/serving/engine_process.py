"""An engine process without scheduler or model, for tests of real front ends: every row gains one token per step.

Speaks the wire over real sockets. The model directory's `config.json` may hold "step_s"; while there is a file `engine-0.hang`
in it, that engine does not become ready.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec

from trireme.config import EngineConfig
from trireme.engine_core.outputs import FrontOutputs
from trireme.transport.process.boot import BootChannel
from trireme.transport.sockets.names import Connection, Disconnected, Peer, Poller, Server
from trireme.transport.wire.messages import (
    Abort,
    Call,
    CallReply,
    End,
    EngineFacts,
    First,
    FromCoordinator,
    FrontToEngine,
    Load,
    Submit,
)


class _Engine:
    def __init__(self, channel: BootChannel) -> None:
        boot = channel.boot
        config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
        self.step_s = (
            float(json.loads((Path(config.model.model) / "config.json").read_text())["stub"]["delay_ms"]) / 1e3
        )
        self.boot = boot
        self.rows: dict[tuple[Peer, int], tuple[Submit, int]] = {}
        self.admitted: dict[str, int] = {}
        self.step = 0
        facts = EngineFacts(boot.index, 4096, 259, 64, 16, 64, 256, 1 << 16)
        self.server = Server.open(boot, f"engine-{boot.index}.front", FrontToEngine, facts=facts)
        self.coordinator = Connection.open(boot, "coordinator", FromCoordinator) if config.parallel.dp > 1 else None

    def read(self) -> None:
        for peer, message in self.server.receive():
            if isinstance(message, Submit):
                self.rows[peer, message.rid] = (message, message.num_replayed)
                self.admitted[peer.name] = max(self.admitted.get(peer.name, 0), message.ticket)
            elif isinstance(message, Abort):
                for rid in message.rids:
                    self.rows.pop((peer, rid), None)
            elif isinstance(message, Disconnected):
                self.rows = {key: row for key, row in self.rows.items() if key[0] is not peer}
            elif isinstance(message, Call):
                stats = {"num_running": len(self.rows), "num_waiting": 0, "steps": self.step}
                self.server.send(peer, CallReply(message.call_id, True, stats))

    def run_step(self) -> None:
        self.step += 1
        self.server.progress = self.step
        for peer in {peer for peer, _ in self.rows}:
            out = FrontOutputs()
            for (owner, rid), (submit, done) in list(self.rows.items()):
                if owner is not peer:
                    continue
                out.add(rid, 97 + done % 26)
                if done == submit.num_replayed:
                    out.firsts.append(First(rid, 0, 0.0, 0.0))
                self.rows[owner, rid] = (submit, done + 1)
                if done + 1 >= submit.params.max_tokens:
                    out.ends.append(End(rid, "length"))
                    del self.rows[owner, rid]
            self.server.send(peer, out.to_message(self.boot.index, self.step))

    def report(self) -> None:
        if self.coordinator is not None:
            list(self.coordinator.receive())
            rows = len(self.rows)
            load = Load(
                self.boot.index, self.boot.epoch, self.step, self.step, 0, rows, 0, rows, 0, 64, 0.0, self.admitted, 0
            )
            self.coordinator.send(load)


def main(channel: BootChannel) -> None:
    for done in range(1, 5):
        channel.progress("weights", done, 4)
        time.sleep(0.1)
    model = Path(msgspec.msgpack.decode(channel.boot.config, type=EngineConfig).model.model)
    while (model / f"{channel.boot.name}.hang").exists():
        time.sleep(0.02)
    engine = _Engine(channel)
    poller = Poller()
    poller.add(engine.server, engine.read)
    poller.add(channel, lambda: None)
    if engine.coordinator is not None:
        poller.add(engine.coordinator, lambda: None)
    channel.ready()
    next_step = time.monotonic()
    while not channel.receive():
        channel.beat(engine.step)
        engine.report()
        poller.wait(max(0.0, next_step - time.monotonic()) if engine.rows else 0.1)
        if engine.rows and time.monotonic() >= next_step:
            engine.run_step()
            next_step = time.monotonic() + engine.step_s
    engine.server.close()

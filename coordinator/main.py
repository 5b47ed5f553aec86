"""The coordinator's process: one socket, one loop, and core.Coordinator for every decision.

Started by launch/supervise.py when there are several engines. Engines send Load, front ends Route and Released; every
front end gets a View when something has changed. May be killed at any moment: nothing depends on its memory.
"""

from __future__ import annotations

import logging
import random
import time
from typing import Any

import msgspec

from coordinator.core import Coordinator
from transport.boot import BootChannel
from transport.messages import Call, CallReply, Hello, Load, Released, Route, ToCoordinator
from transport.sockets import Left, Peer, Poller, Server
from trireme.config import EngineConfig
from trireme.fleet import fleet_of
from trireme.log import configure

log = logging.getLogger("trireme.coordinator")

VIEW_S = 0.05  # at most one View in this time
VIEW_IDLE_S = 1.0  # and at least one in this


class Shell:
    """Feeds messages to the Coordinator and sends what it answers."""

    def __init__(self, channel: BootChannel, config: EngineConfig) -> None:
        boot = channel.boot
        self._channel = channel
        self._core = Coordinator(
            config.parallel.dp,
            config.coordinator.balance,
            random.SystemRandom(),
            epoch=boot.epoch,
            fleet=fleet_of(config),
        )
        self._server = Server.open(boot, "coordinator", ToCoordinator)
        self._poller = Poller()
        self._poller.add(self._server, self._on_messages)
        self._poller.add(channel, self._on_orders)
        self._next_view = 0.0
        self._latest_view = 0.0
        self._next_sweep = 0.0
        self._leaving = False

    def run(self) -> None:
        while not self._leaving:
            now = time.monotonic()
            if now >= self._next_sweep:
                self._core.expire(now)
                self._next_sweep = now + 1.0
            if now >= self._latest_view or (self._core.changed and now >= self._next_view):
                self._publish(now)
            self._channel.beat(self._core.num_routed)
            due = self._next_view if self._core.changed else self._latest_view
            self._poller.wait(max(0.0, min(due, self._next_sweep) - now))
        self._server.close()

    def _publish(self, now: float) -> None:
        self._core.changed = False
        self._server.broadcast(self._core.view(), role="front")
        self._next_view, self._latest_view = now + VIEW_S, now + VIEW_IDLE_S

    def _on_orders(self) -> None:
        self._leaving = bool(self._channel.receive()) or self._leaving

    def _on_messages(self) -> None:
        for peer, message in self._server.receive():
            match message:
                case Route() if peer.role == "front":
                    self._server.send(peer, self._core.route(peer.name, message, time.monotonic()))
                case Load() if peer.role == "engine":
                    self._core.engine_reported(message)
                case Released() if peer.role == "front":
                    self._core.released(peer.name, message)
                case Hello():
                    self._on_arrival(peer)
                case Left():
                    self._on_loss(peer, message.reason)
                case Call():
                    self._server.send(peer, self._answer(message))
                case _:
                    log.warning("ignored a message type=%s from=%s", type(message).__name__, peer.name)

    def _on_arrival(self, peer: Peer) -> None:
        log.info("connected peer=%s epoch=%d pid=%d", peer.name, peer.epoch, peer.pid)
        if peer.role == "engine":
            self._core.engine_connected(engine_index(peer.name), peer.epoch)
        elif peer.role == "front":
            self._server.send(peer, self._core.view())

    def _on_loss(self, peer: Peer, reason: str) -> None:
        log.info("lost peer=%s epoch=%d reason=%s", peer.name, peer.epoch, reason)
        if peer.role == "engine":
            self._core.engine_lost(engine_index(peer.name), peer.epoch, reason)
        elif peer.role == "front":
            self._core.front_lost(peer.name)

    def _answer(self, call: Call) -> CallReply:
        methods = {"stats": self._stats}
        method = methods.get(call.method)
        if method is None:
            return CallReply(call.call_id, ok=False, error=f"the coordinator has no method {call.method!r:.40}")
        return CallReply(call.call_id, ok=True, result=method())

    def _stats(self) -> dict[str, Any]:
        core = self._core
        return {
            "num_routed": core.num_routed,
            "num_refused": core.num_refused,
            "num_expired": core.num_expired,
            "costs": {str(engine.index): core.cost(engine.index) for engine in core.members},
            "members": msgspec.to_builtins(core.view().members),
            "socket": self._server.counts(),
        }


def engine_index(name: str) -> int:
    """3 for `engine-3`; -1 (no engine) for anything else."""
    prefix, _, number = name.rpartition("-")
    return int(number) if prefix == "engine" and number.isdecimal() else -1


def main(channel: BootChannel) -> None:
    """Entry of the child process."""
    config = msgspec.msgpack.decode(channel.boot.config, type=EngineConfig)
    configure(channel.boot.name, level=config.launch.log_level, form=config.launch.log_format)
    shell = Shell(channel, config)
    channel.ready()
    shell.run()

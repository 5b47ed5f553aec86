"""The coordinator's messages and timers: feeds core.Coordinator, sends its answers, publishes Views.

Called by main.py on sockets and the process's clock, and under virtual time on a simulated network; owns neither.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from trireme.coordinator.core import Coordinator
from trireme.errors import EngineError
from trireme.topology.lockstep import pause_mode
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import (
    Call,
    CallReply,
    GiveBack,
    Hello,
    KVEvents,
    Load,
    Released,
    Resync,
    Route,
    WaveReport,
    Wire,
)

log = logging.getLogger("trireme.coordinator")

VIEW_S = 0.05  # minimum interval between Views
VIEW_IDLE_S = 1.0  # maximum interval between Views
RESYNC_S = 1.0  # minimum interval between two requests for all blocks of an engine


class PeerServer(Protocol):
    """The part of transport's Server that the shell uses."""

    def receive(self, limit: int = 1024) -> Iterator[tuple[Peer, Any]]: ...

    def send(self, peer: Peer, message: Wire) -> bool: ...

    def broadcast(self, message: Wire, role: Any = None) -> None: ...

    def counts(self) -> dict[str, int]: ...


class CoordinatorShell:
    """Owned by one loop: call `turn` when something is due, `on_messages` when something has arrived."""

    def __init__(self, core: Coordinator, server: PeerServer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._server = server
        self._clock = clock
        self._pausers: list[tuple[Peer, int, int]] = []  # (peer, call, number of the pause or resume) not answered yet
        self._next_view = 0.0
        self._latest_view = 0.0
        self._next_sweep = 0.0
        self._next_resync: dict[int, float] = {}
        self._engines: dict[int, Peer] = {}

    @property
    def num_routed(self) -> int:
        return self._core.num_routed

    def turn(self) -> float:
        """Does what is due; returns the seconds until something is due again if nothing arrives."""
        now = self._clock()
        if now >= self._next_sweep:
            self._core.expire(now)
            self._next_sweep = now + 1.0
        if now >= self._latest_view or (self._core.changed and now >= self._next_view):
            self._publish(now)
        due = self._next_view if self._core.changed else self._latest_view
        return max(0.0, min(due, self._next_sweep) - now)

    def _publish(self, now: float) -> None:
        self._core.changed = False
        for order in self._core.orders(now):
            self._order(order)
        self._server.broadcast(self._core.view(), role="front")
        self._next_view, self._latest_view = now + VIEW_S, now + VIEW_IDLE_S

    def on_messages(self) -> None:
        """Handles all messages that have arrived."""
        for peer, message in self._server.receive():
            match message:
                case Route() if peer.role == "front":
                    self._server.send(peer, self._core.route(peer.name, message, self._clock()))
                case Load() if peer.role == "engine":
                    self._core.engine_reported(message)
                case KVEvents() if peer.role == "engine":
                    self._on_blocks(peer, message)
                case Released() if peer.role == "front":
                    self._core.released(peer.name, message)
                case WaveReport() if peer.role == "engine":
                    self._core.wave_reported(message)
                case Hello():
                    self._on_arrival(peer)
                case Disconnected():
                    self._on_loss(peer, message.reason)
                case Call() if message.method in ("pause", "resume"):
                    self._pause(peer, message)
                case Call():
                    self._server.send(peer, self._answer(message))
                case _:
                    log.warning("ignored a message type=%s from=%s", type(message).__name__, peer.name)
        self._settle_waves()

    def _order(self, order: GiveBack) -> None:
        """Sends an order; one that does not reach its engine is given again."""
        if (peer := self._engines.get(order.engine)) is not None:
            self._server.send(peer, order)

    def _on_blocks(self, peer: Peer, events: KVEvents) -> None:
        now = self._clock()
        if not self._core.engine_cached(events) and now >= self._next_resync.get(events.engine, 0.0):
            self._next_resync[events.engine] = now + RESYNC_S
            log.info("missed a report of cached blocks engine=%d seq=%d", events.engine, events.seq)
            self._server.send(peer, Resync(events.engine))

    def _on_arrival(self, peer: Peer) -> None:
        log.info("connected peer=%s epoch=%d pid=%d", peer.name, peer.epoch, peer.pid)
        if peer.role == "engine":
            index = engine_index(peer.name)
            if index in self._core.members:
                self._engines[index] = peer
            self._core.engine_connected(index, peer.epoch)
        elif peer.role == "front":
            self._server.send(peer, self._core.view())

    def _on_loss(self, peer: Peer, reason: str) -> None:
        log.info("lost peer=%s epoch=%d reason=%s", peer.name, peer.epoch, reason)
        if peer.role == "engine":
            self._core.engine_lost(engine_index(peer.name), peer.epoch, reason)
        elif peer.role == "front":
            self._core.front_lost(peer.name)

    def _pause(self, peer: Peer, call: Call) -> None:
        """Pauses or resumes lockstep engines; answers when all of them are in the requested mode."""
        try:
            if self._core.waves is None:
                raise EngineError("these engines do not step together: each is paused by itself")
            mode = pause_mode(call.args.get("mode", "wait")) if call.method == "pause" else ""
            self._pausers.append((peer, call.call_id, self._core.waves.direct(mode)))
        except EngineError as error:
            self._server.send(peer, CallReply(call.call_id, ok=False, error=error.message))

    def _settle_waves(self) -> None:
        """Sends orders that engines have not received, and answers that are due."""
        waves = self._core.waves
        if waves is None:
            return
        for rank, order in waves.orders():
            self._server.send(self._engines[rank], order)
        waiting, self._pausers = self._pausers, []
        for peer, call_id, number in waiting:
            stands = waves.standing(number)
            if stands is False:
                self._pausers.append((peer, call_id, number))
            else:
                error = "" if stands else "another pause or resume came in between"
                self._server.send(peer, CallReply(call_id, ok=not error, result=[], error=error))

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
            "prefix_bytes": core.prefixes.num_bytes,
            "prefix_keys": core.prefixes.num_keys,
            "prefix_gaps": core.prefixes.num_gaps,
            "waves": self._waves(),
            "members": msgspec.to_builtins(core.view().members),
            "socket": self._server.counts(),
        }

    def _waves(self) -> dict[str, Any] | None:
        waves = self._core.waves
        if waves is None:
            return None
        return {"wave": waves.wave, "is_parked": waves.is_parked, "pause": waves.mode, "epoch": waves.epoch}


def engine_index(name: str) -> int:
    """3 for `engine-3`; -1 (no engine) for anything else."""
    prefix, _, number = name.rpartition("-")
    return int(number) if prefix == "engine" and number.isdecimal() else -1

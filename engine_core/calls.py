"""Rare requests of frontends to an engine: statistics, an audit, sleep and wake, pause and resume.

Used by EngineLoop, which passes them on. Each is answered once, now or when what it ordered is done.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import Executor
from trireme.engine_core.frontends import FrontServer
from trireme.engine_core.lifecycle.sleep import SleepState
from trireme.engine_core.lifecycle.stepping import Stepping
from trireme.errors import EngineError
from trireme.topology.lockstep import pause_mode
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import Call, CallReply


class EngineCalls:
    """Answers calls over the socket by which they came. `stats` gives all counters of the engine."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        server: FrontServer,
        *,
        sleep_state: SleepState,
        stepping: Stepping,
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self._core = core
        self._executor = executor
        self._server = server
        self._sleep_state = sleep_state
        self._stepping = stepping
        self._answers: dict[str, Callable[[], Any]] = {
            "stats": stats,
            "audit": lambda: msgspec.to_builtins(core.audit()),
            "reset_prefix_cache": core.reset_prefix_cache,
        }

    def answer(self, peer: Peer, call: Call) -> None:
        """Carries out a call; unknown or failing methods get an error text."""
        if call.method in self._answers:
            self._server.send(peer, CallReply(call.call_id, True, self._answers[call.method]()))
        elif call.method == "workers":
            self._executor.call("info", {}, lambda found, error: self._reply(peer, call.call_id, found, error))
        elif call.method == "sleep":
            self.sleep(call.args.get("level", 1), lambda error: self._reply(peer, call.call_id, [], error))
        elif call.method == "wake":
            self._sleep_state.wake(lambda error: self._reply(peer, call.call_id, [], error))
        elif call.method in ("pause", "resume"):
            self._pause(peer, call)
        else:
            known = ", ".join([*self._answers, "workers", "sleep", "wake", "pause", "resume"])
            error = f"an engine has no method {call.method!r:.40}; it has {known}"
            self._server.send(peer, CallReply(call.call_id, False, None, error))

    def sleep(self, level: Any, answer: Callable[[str], object]) -> None:
        """Enters sleep of a level, if nothing is under way. `answer` gets the error, "" for success."""
        under_way = 0 if self._core.is_idle else max(1, len(self._core.requests))
        if self._sleep_state.sleep(level, under_way, answer):
            self._core.reset_prefix_cache()

    def _pause(self, peer: Peer, call: Call) -> None:
        try:
            mode = pause_mode(call.args.get("mode", "wait")) if call.method == "pause" else ""
        except EngineError as error:
            self._reply(peer, call.call_id, [], error.message)
        else:
            self._stepping.direct(mode, lambda error: self._reply(peer, call.call_id, [], error))

    def _reply(self, peer: Peer, call_id: int, found: list[Any], error: str) -> None:
        self._server.send(peer, CallReply(call_id, not error, found, error))

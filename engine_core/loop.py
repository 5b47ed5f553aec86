"""The engine loop: one thread that moves messages between frontends, the EngineCore and the workers.

Used by main (own process) and by launch for an engine inside the caller's process. EngineCore makes all decisions. Health follows
from steps: the progress counter moves only when steps complete.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from trireme.engine_core.calls import EngineCalls
from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import Executor
from trireme.engine_core.frontends import FrontServer
from trireme.engine_core.health import HealthCheck
from trireme.engine_core.lifecycle.drain import DrainTimes
from trireme.engine_core.lifecycle.graph_capture import Captures
from trireme.engine_core.lifecycle.sleep import SleepState
from trireme.engine_core.lifecycle.stepping import Independent, Stepping
from trireme.engine_core.reports import BusyLog, LoadReports
from trireme.log import facts
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.messages import (
    Abort,
    Call,
    Drain,
    EngineDown,
    GiveBack,
    Hello,
    KVEvents,
    Load,
    Submit,
)

log = logging.getLogger("trireme.engine")

WATCH_S = 0.2  # between progress checks, while there is work


class EngineLoop:
    """The loop of one engine. `on_load` sends reports to the coordinator and returns whether they went out; `on_turn` is called on
    every iteration (heartbeat). With `tells_blocks` reports include prefix-cache changes; with `has_captures` workers hold captured
    CUDA graphs and are told when to change them."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        server: FrontServer,
        poller: Poller,
        *,
        step_timeout: float = 15.0,
        stepping: Stepping | None = None,
        on_load: Callable[[Load | KVEvents], bool] | None = None,
        on_turn: Callable[[int], None] | None = None,
        tells_blocks: bool = False,
        has_captures: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.core = core
        self.stepping = stepping or Independent(core)
        self.reports = LoadReports(core, on_load, tells_blocks=tells_blocks)
        self.sleep_state = SleepState(self._order)
        self.calls = EngineCalls(
            core, executor, server, sleep_state=self.sleep_state, stepping=self.stepping, stats=self.stats
        )
        self.is_over = False
        self._executor = executor
        self._server = server
        self._poller = poller
        self._clock = clock
        self._on_turn = on_turn
        self._health = HealthCheck(core, executor, server, self.stepping, step_timeout)
        self._busy_log = BusyLog(core, clock())
        self._captures = Captures(self._order_captures) if has_captures else None
        self._drain = DrainTimes()
        self._step_s: deque[float] = deque(maxlen=64)  # CPU seconds per step: result, next plan, outputs
        poller.add(server, self._on_messages)

    def run(self) -> None:
        """Iterates until a drain is over. Raises EngineError (or the workers' error) when the engine cannot continue."""
        while not self.is_over:
            self.turn()

    def turn(self, wait_s: float = 1.0) -> None:
        """One iteration over all inputs. Waits at most `wait_s` for one to arrive."""
        now, began_s, steps = self._clock(), time.thread_time(), self.core.counters.steps
        self._health.turn(now)
        for result in self._executor.take_results():
            self.core.on_result(result, now)
            self.stepping.on_result(result)
            self.reports.has_news = True
        self.core.tick(now)
        if not self.sleep_state.is_awake and (self.core.requests or not self.stepping.can_shut_down):
            self.sleep_state.work_came()
        while self.sleep_state.is_awake and (plan := self.stepping.next_plan(now)) is not None:
            if plan.new:
                self._send_outputs()  # if this step kills the engine, frontends know which requests were in it
            self._executor.submit(plan)
        self._send_outputs()
        self.stepping.settle()
        self._server.progress = self.core.counters.steps
        self._health.look(now, is_awake=self.sleep_state.is_awake)
        self._check_drain(now)
        if self._captures is not None and self.sleep_state.is_awake:
            is_idle = self.core.is_idle and self.stepping.can_shut_down
            self._captures.look(now, self.core.counters.steps, is_idle=is_idle)
        self.reports.look(now)
        self._busy_log.look(now)
        if self._on_turn is not None:
            self._on_turn(self.core.counters.steps)
        if self.core.counters.steps > steps:
            self._step_s.append((time.thread_time() - began_s) / (self.core.counters.steps - steps))
        self._poller.wait(max(0.0, min(wait_s, self._next_due() - self._clock())))

    def drain(self, order: Drain) -> None:
        """Accepts new work for `notice_s`, finishes the rest until the deadline, then ends."""
        self._drain.order(self._clock(), order.notice_s, order.deadline_s)

    def last_words(self, error: str) -> None:
        """Tells every frontend why its sequences are lost."""
        self._server.broadcast(EngineDown(self.core.engine, error))

    def reclaim(self, order: GiveBack) -> None:
        """The coordinator moves sequences that wait here to another engine."""
        if order.epoch == self.core.epoch:
            count = self.core.reclaim(min(order.count, len(self.core.requests)), order.to, self._clock())
            self.reports.has_news = True
            log.info("reclaimed %s", facts(sequences=count, asked=order.count, to=order.to))

    def stats(self) -> dict[str, Any]:
        """All counters in one flat dictionary: load, totals, blocks, prefix cache, socket."""
        core = self.core
        scheduler, cache = core.scheduler, core.scheduler.cache
        load = msgspec.to_builtins(core.stats(self._clock()))
        names = Load.__struct_fields__
        found: dict[str, Any] = dict(zip(names, load[-len(names) :], strict=True))
        return {
            **found,
            **msgspec.to_builtins(core.counters),
            "step_time_error": scheduler.budget.times.errors()[0],
            "step_time_error_p95": scheduler.budget.times.errors()[1],
            "step_time_level": scheduler.budget.times.level,
            "itl_target_s": core.limits.itl_target,
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": cache.num_queried,
            "prefix_hits": cache.num_hit,
            "blocks_free": len(cache.pool.free),
            "blocks_cached": len(cache.pool.cached),
            "blocks_owned": core.limits.num_blocks - cache.num_available,
            "num_in_flight": len(scheduler.in_flight),
            "state": self.sleep_state.state,
            "sleep_level": self.sleep_state.level,
            "pause": self.stepping.mode,
            "core_s": time.thread_time(),
            "core_step_s": list(self._step_s),
            **(self._captures.counts if self._captures is not None else {}),
            "socket": self._server.counts(),
        }

    # ------------------------------------------------------------ frontends

    def _on_messages(self) -> None:
        now = self._clock()
        for peer, message in self._server.receive():
            self.reports.has_news = True
            match message:
                case Submit():
                    self.core.submit(peer.name, message, now)
                case Abort():
                    self.core.abort(peer.name, message.rids)
                case Call():
                    self.calls.answer(peer, message)
                case Hello():
                    log.info("frontend connected %s", facts(name=peer.name, epoch=peer.epoch, pid=peer.pid))
                case Disconnected():
                    log.info("frontend left %s", facts(name=peer.name, epoch=peer.epoch, reason=repr(message.reason)))
                    self.core.front_gone(peer.name)

    def _send_outputs(self) -> None:
        peers = self._server.peers
        for front, outputs in self.core.take_outputs().items():
            peer = peers.get(front)
            if peer is not None:
                self._server.send(peer, outputs)

    # ------------------------------------------------------------ workers

    def _order(self, method: str, args: dict[str, Any]) -> None:
        log.info("%s %s", method, facts(**args))
        self._executor.call(method, args, lambda found, error: self.sleep_state.done(error))

    def _order_captures(self, args: dict[str, Any]) -> None:
        assert self._captures is not None
        self._executor.call("adapt", args, self._captures.answered)

    # ------------------------------------------------------------ time

    def _check_drain(self, now: float) -> None:
        """Refuses new work once the drain has begun, and ends the loop when nothing is left or no time."""
        if now < self._drain.begins:
            return
        self.core.draining = True
        is_idle = self.core.is_idle
        if (is_idle and self.stepping.can_shut_down) or now >= self._drain.ends:
            if not is_idle:
                self.last_words("the engine was shut down before this request ended")
            self.is_over = True

    def _next_due(self) -> float:
        """When the loop next has work even if nothing arrives."""
        due = self.core.next_deadline() or float("inf")
        if self.core.requests:
            due = min(due, self._clock() + WATCH_S)
        if self._captures is not None and self.sleep_state.is_awake:
            due = min(due, self._captures.next_due(self.core.counters.steps))
        return min(due, self.reports.next_due(), self._drain.next_due(has_begun=self.core.draining))

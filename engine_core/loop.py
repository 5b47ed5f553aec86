"""The engine loop: one thread that moves messages between frontends, the EngineCore and the workers.

Used by main (own process) and by launch for an engine inside the caller's process. EngineCore makes all decisions. Health follows
from steps: the progress counter moves only when steps complete.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import Executor
from trireme.engine_core.lifecycle.graph_capture import Captures
from trireme.engine_core.lifecycle.sleep import SleepState
from trireme.engine_core.lifecycle.stepping import Independent, Stepping
from trireme.engine_core.stall import StallWatch
from trireme.errors import EngineError
from trireme.log import facts
from trireme.topology.lockstep import is_pause, pause_mode
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.sockets.poller import Poller, Source
from trireme.transport.sockets.server import Peer
from trireme.transport.wire.messages import (
    Abort,
    Call,
    CallReply,
    Drain,
    EngineDown,
    GiveBack,
    Hello,
    KVEvents,
    Load,
    Pong,
    Submit,
    Wire,
)

log = logging.getLogger("trireme.engine")

LOAD_S, LOAD_IDLE_S = 0.02, 1.0  # between load reports: minimum, and maximum when idle
STATS_S = 10.0
YOUNG_S = 0.1  # starvation is not checked for steps younger than this
WATCH_S = 0.2  # between progress checks, while there is work
HALT_S = 0.5  # between checks for stopped or starved workers


class FrontServer(Source, Protocol):
    """The part of transport's Server and LocalServer that the loop uses."""

    progress: int
    stalled: str

    @property
    def peers(self) -> Any: ...

    def receive(self, limit: int = 1024) -> Any: ...

    def send(self, peer: Peer, message: Wire) -> bool: ...

    def broadcast(self, message: Wire, role: Any = None) -> None: ...

    def counts(self) -> dict[str, int]: ...


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
        pace: Stepping | None = None,
        on_load: Callable[[Load | KVEvents], bool] | None = None,
        on_turn: Callable[[int], None] | None = None,
        tells_blocks: bool = False,
        has_captures: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.core = core
        self.pace = pace or Independent(core)
        self.is_over = False
        self._executor = executor
        self._server = server
        self._poller = poller
        self._watch = StallWatch(core.step_times, step_timeout, most_tokens=self.pace.most_tokens)
        self._halted, self._next_halt = "", 0.0
        self._on_load = on_load
        self._on_turn = on_turn
        self._blocks = core.log_blocks() if tells_blocks else None
        self._changed = True  # since the last Load
        self._next_load = self._latest_load = 0.0
        self._next_stats = self._clock() + STATS_S
        self._steps_logged = 0
        self._step_s: deque[float] = deque(maxlen=64)  # CPU seconds per step: result, next plan, outputs
        self._was_idle = True
        self._drain_from = self._drain_until = float("inf")
        self._rest = SleepState(self._order)
        self._captures = Captures(self._order_captures) if has_captures else None
        poller.add(server, self._on_messages)

    def run(self) -> None:
        """Iterates until a drain is over. Raises EngineError (or the workers' error) when the engine cannot continue."""
        while not self.is_over:
            self.turn()

    def turn(self, wait_s: float = 1.0) -> None:
        """One iteration over all inputs. Waits at most `wait_s` for one to arrive."""
        now, began_s, steps = self._clock(), time.thread_time(), self.core.counters.steps
        self._watch.turn(now)
        for result in self._executor.take_results():
            self.core.on_result(result, now)
            self.pace.on_result(result)
            self._changed = True
        self.core.tick(now)
        if not self._rest.is_awake and (self.core.requests or not self.pace.can_shut_down):
            self._rest.work_came()
        while self._rest.is_awake and (plan := self.pace.next_plan(now)) is not None:
            if plan.new:
                self._send_outputs()  # if this step kills the engine, frontends know which requests were in it
            self._executor.submit(plan)
        self._send_outputs()
        self.pace.settle()
        self._server.progress = self.core.counters.steps
        self._check_health(now)
        if self._captures is not None and self._rest.is_awake:
            self._captures.look(now, self.core.counters.steps, is_idle=self.core.is_idle and self.pace.can_shut_down)
        self._report(now)
        if self._on_turn is not None:
            self._on_turn(self.core.counters.steps)
        if self.core.counters.steps > steps:
            self._step_s.append((time.thread_time() - began_s) / (self.core.counters.steps - steps))
        self._poller.wait(max(0.0, min(wait_s, self._next_due() - self._clock())))

    def drain(self, order: Drain) -> None:
        """Accepts new work for `notice_s`, finishes the rest until the deadline, then ends."""
        now = self._clock()
        self._drain_from = min(self._drain_from, now + order.notice_s)
        self._drain_until = min(self._drain_until, now + order.notice_s + order.deadline_s)

    def last_words(self, error: str) -> None:
        """Tells every frontend why its sequences are lost."""
        self._server.broadcast(EngineDown(self.core.engine, error))

    def report_now(self) -> None:
        """The coordinator is new or back: it needs a Load at once, and a full listing of blocks."""
        self.tell_all_blocks()
        self._changed, self._next_load = True, 0.0

    def reclaim(self, order: GiveBack) -> None:
        """The coordinator moves sequences that wait here to another engine."""
        if order.epoch == self.core.epoch:
            count = self.core.reclaim(min(order.count, len(self.core.requests)), order.to, self._clock())
            self._changed = True
            log.info("gave back %s", facts(rows=count, asked=order.count, to=order.to))

    def tell_all_blocks(self) -> None:
        """The coordinator has missed a report."""
        if self._blocks is not None:
            self._blocks.restart()
            self._changed = True

    # ------------------------------------------------------------ frontends

    def _on_messages(self) -> None:
        now = self._clock()
        for peer, message in self._server.receive():
            self._changed = True
            match message:
                case Submit():
                    self.core.submit(peer.name, message, now)
                case Abort():
                    self.core.abort(peer.name, message.rids)
                case Call():
                    self._on_call(peer, message)
                case Hello():
                    log.info("front end connected %s", facts(name=peer.name, epoch=peer.epoch, pid=peer.pid))
                case Disconnected():
                    log.info("front end left %s", facts(name=peer.name, epoch=peer.epoch, reason=repr(message.reason)))
                    self.core.front_gone(peer.name)

    def _send_outputs(self) -> None:
        peers = self._server.peers
        for front, outputs in self.core.take_outputs().items():
            peer = peers.get(front)
            if peer is not None:
                self._server.send(peer, outputs)

    def _on_call(self, peer: Peer, call: Call) -> None:
        """Answers a rare request; unknown or failing methods get an error text."""
        own: dict[str, Callable[[], Any]] = {
            "stats": self.stats,
            "audit": lambda: msgspec.to_builtins(self.core.audit()),
            "reset_prefix_cache": self.core.reset_prefix_cache,
        }
        if call.method in own:
            self._server.send(peer, CallReply(call.call_id, True, own[call.method]()))
        elif call.method == "workers":
            self._executor.call("info", {}, lambda found, error: self._reply(peer, call.call_id, found, error))
        elif call.method == "sleep":
            self._sleep(call.args.get("level", 1), lambda error: self._reply(peer, call.call_id, [], error))
        elif call.method == "wake":
            self._rest.wake(lambda error: self._reply(peer, call.call_id, [], error))
        elif call.method in ("pause", "resume"):
            self._pause(peer, call)
        else:
            known = ", ".join([*own, "workers", "sleep", "wake", "pause", "resume"])
            error = f"an engine has no method {call.method!r:.40}; it has {known}"
            self._server.send(peer, CallReply(call.call_id, False, None, error))

    def _pause(self, peer: Peer, call: Call) -> None:
        try:
            mode = pause_mode(call.args.get("mode", "wait")) if call.method == "pause" else ""
        except EngineError as error:
            self._reply(peer, call.call_id, [], error.message)
        else:
            self.pace.direct(mode, lambda error: self._reply(peer, call.call_id, [], error))

    def _sleep(self, level: Any, answer: Callable[[str], object]) -> None:
        under_way = 0 if self.core.is_idle else max(1, len(self.core.requests))
        if self._rest.sleep(level, under_way, answer):
            self.core.reset_prefix_cache()

    def _order(self, method: str, args: dict[str, Any]) -> None:
        log.info("%s %s", method, facts(**args))
        self._executor.call(method, args, lambda found, error: self._rest.done(error))

    def _order_captures(self, args: dict[str, Any]) -> None:
        assert self._captures is not None
        self._executor.call("adapt", args, self._captures.answered)

    def _reply(self, peer: Peer, call_id: int, found: list[Any], error: str) -> None:
        self._server.send(peer, CallReply(call_id, not error, found, error))

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
            "step_time_error": scheduler.times.errors()[0],
            "step_time_error_p95": scheduler.times.errors()[1],
            "step_time_level": scheduler.times.level,
            "itl_target_s": core.limits.itl_target,
            "preemptions": scheduler.num_preemptions,
            "prefix_queries": cache.num_queried,
            "prefix_hits": cache.num_hit,
            "blocks_free": len(cache.pool.free),
            "blocks_cached": len(cache.pool.cached),
            "blocks_owned": core.limits.num_blocks - cache.num_available,
            "num_in_flight": len(scheduler.in_flight),
            "state": self._rest.state,
            "sleep_level": self._rest.level,
            "pause": self.pace.mode,
            "core_s": time.thread_time(),
            "core_step_s": list(self._step_s),
            **(self._captures.counts if self._captures is not None else {}),
            "socket": self._server.counts(),
        }

    # ------------------------------------------------------------ health

    def _check_health(self, now: float) -> None:
        """Updates the stall state. Fails the engine when a step never ends, audits an idle engine, and stops a drained one."""
        watch, has_work = self._watch, self.pace.has_step and self._rest.is_awake
        step, starved_s = self.core.oldest_step(), 0.0
        if now >= self._next_halt:
            self._halted, self._next_halt = self._executor.halted(), now + HALT_S
            if step is not None and now - step[1] > YOUNG_S:
                starved_s = self._executor.starved_s()
        watch.look(now, step, has_work=has_work, halted=self._halted, starved_s=starved_s)
        stalled = watch.stalled or self.pace.stall_reason(now)
        if bool(stalled) != bool(self._server.stalled):
            self._tell_health(stalled)
        if watch.stuck:
            raise EngineError(watch.stuck, hint="--step-timeout gives steps more time")
        is_idle = self.core.is_idle
        if is_idle and not self._was_idle:
            self.core.check_idle()
        self._was_idle = is_idle
        if now >= self._drain_from:
            self.core.draining = True
            if (is_idle and self.pace.can_shut_down) or now >= self._drain_until:
                if not is_idle:
                    self.last_words("the engine was shut down before this request ended")
                self.is_over = True

    def _tell_health(self, stalled: str) -> None:
        """Tells every frontend at once rather than at its next Ping."""
        level = logging.INFO if is_pause(stalled or self._server.stalled) else logging.WARNING
        log.log(level, "no progress: %s" if stalled else "progress again%s", stalled)
        self._server.stalled = stalled
        self._server.broadcast(Pong(0, self._server.progress, stalled), role="front")

    def _report(self, now: float) -> None:
        if self._on_load is not None and (now >= self._latest_load or (self._changed and now >= self._next_load)):
            self._changed = False
            self._next_load, self._latest_load = now + LOAD_S, now + LOAD_IDLE_S
            if self._on_load(self.core.stats(now)) and (events := self.core.take_kv_events()) is not None:
                self._tell_blocks(events)
        if now >= self._next_stats:
            self._next_stats = now + STATS_S
            self._log_stats(now)

    def _tell_blocks(self, events: KVEvents) -> None:
        assert self._on_load is not None
        assert self._blocks is not None
        if self._on_load(events):
            self._changed = self._blocks.is_due
        else:
            self._blocks.restart()

    def _log_stats(self, now: float) -> None:
        totals = self.core.counters
        if totals.steps == self._steps_logged and self.core.is_idle:
            return
        load = self.core.stats(now)
        log.info(
            "busy %s",
            facts(
                running=load.num_running,
                waiting=load.num_waiting,
                steps=totals.steps - self._steps_logged,
                output_tokens=totals.output_tokens,
                blocks=f"{load.blocks_used}/{load.num_blocks}",
                preemptions=self.core.scheduler.num_preemptions,
            ),
        )
        self._steps_logged = totals.steps

    def _next_due(self) -> float:
        """When the loop next has work even if nothing arrives."""
        due = self.core.next_deadline() or float("inf")
        if self.core.requests:
            due = min(due, self._clock() + WATCH_S)
        if self._captures is not None and self._rest.is_awake:
            due = min(due, self._captures.next_due(self.core.counters.steps))
        if self._on_load is not None:
            due = min(due, self._next_load if self._changed else self._latest_load)
        if self._drain_from != float("inf"):
            due = min(due, self._drain_from if not self.core.draining else self._drain_until)
        return due

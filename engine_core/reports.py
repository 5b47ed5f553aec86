"""What an engine tells of itself unasked: load and cached blocks to the coordinator, a line of totals to the log.

Used by EngineLoop. The time is an argument; nothing here changes what the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from trireme.engine_core.core import EngineCore
from trireme.log import facts
from trireme.transport.wire.messages import KVEvents, Load

log = logging.getLogger("trireme.engine")

LOAD_S, LOAD_IDLE_S = 0.02, 1.0  # between load reports: minimum, and maximum when idle
STATS_S = 10.0


class LoadReports:
    """Reports to the coordinator. `send` returns whether one went out (None: there is no coordinator). With `tells_blocks` they
    include prefix-cache changes."""

    def __init__(
        self, core: EngineCore, send: Callable[[Load | KVEvents], bool] | None, *, tells_blocks: bool = False
    ) -> None:
        self.has_news = True  # since the last Load
        self._core = core
        self._send = send
        self._blocks = core.log_blocks() if tells_blocks else None
        self._next = self._latest = 0.0  # when a Load may be sent, and when it must be

    def look(self, now: float) -> None:
        """Sends what is due."""
        if self._send is None or not (now >= self._latest or (self.has_news and now >= self._next)):
            return
        self.has_news = False
        self._next, self._latest = now + LOAD_S, now + LOAD_IDLE_S
        if self._send(self._core.stats(now)) and (events := self._core.take_kv_events()) is not None:
            self._tell_blocks(self._send, events)

    def next_due(self) -> float:
        """When to call `look` again."""
        if self._send is None:
            return float("inf")
        return self._next if self.has_news else self._latest

    def start_over(self) -> None:
        """The coordinator is new or back: it needs a Load at once, and a full listing of blocks."""
        self.tell_all_blocks()
        self.has_news, self._next = True, 0.0

    def tell_all_blocks(self) -> None:
        """The coordinator has missed a report."""
        if self._blocks is not None:
            self._blocks.restart()
            self.has_news = True

    def _tell_blocks(self, send: Callable[[Load | KVEvents], bool], events: KVEvents) -> None:
        assert self._blocks is not None
        if send(events):
            self.has_news = self._blocks.is_due
        else:
            self._blocks.restart()


class BusyLog:
    """One line in STATS_S while there is work."""

    def __init__(self, core: EngineCore, now: float) -> None:
        self._core = core
        self._next = now + STATS_S
        self._steps = 0  # at the last line

    def look(self, now: float) -> None:
        """Writes the line when it is due."""
        if now < self._next:
            return
        self._next = now + STATS_S
        totals = self._core.counters
        if totals.steps == self._steps and self._core.is_idle:
            return
        load = self._core.stats(now)
        log.info(
            "busy %s",
            facts(
                running=load.num_running,
                waiting=load.num_waiting,
                steps=totals.steps - self._steps,
                output_tokens=totals.output_tokens,
                blocks=f"{load.blocks_used}/{load.num_blocks}",
                preemptions=self._core.scheduler.num_preemptions,
            ),
        )
        self._steps = totals.steps

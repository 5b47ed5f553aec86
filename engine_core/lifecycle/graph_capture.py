"""When workers may change their captured CUDA graphs: while idle, or every BUSY_STEPS steps under load. Pure; EngineLoop passes
time in and carries out the orders.

One order at a time. Workers decide what to change (workers.cuda.graph_adapt); all of them get the order at the same place among
the plans, together with the measurements of all, so that all decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from trireme.errors import EngineError
from trireme.log import facts
from trireme.sizes import format_bytes

log = logging.getLogger("trireme.engine")

QUIET_S = 0.25  # without a request: no burst is under way
BUSY_STEPS = 512  # between orders under load: the cost of an order itself is then negligible
COUNTS = {
    "captured": "graphs_captured",
    "dropped": "graphs_dropped",
    "replays": "graph_replays",
    "padded": "graph_padded_rows",
    "held": "graph_bytes",
}


class Captures:
    """`order(args)` goes to all workers; `answered` gets their replies. Call `look` on every iteration while awake."""

    def __init__(self, order: Callable[[dict[str, Any]], object]) -> None:
        self.counts: dict[str, int] = {}  # of the first worker: all are equal
        self._order = order
        self._known: dict[str, float] | None = None  # worst measurements over all workers
        self._is_asked = self._was_idle = self._is_full = False
        self._quiet_since: float | None = None
        self._asked_at = 0  # steps
        self._settled_at: int | None = None  # steps when no change was left to make

    def look(self, now: float, steps: int, *, is_idle: bool) -> None:
        """Orders a change when one is due. `is_idle`: no request and no step in flight."""
        if not is_idle:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = now
        if self._is_asked:
            return
        if now >= self.next_due(steps) or (not is_idle and steps - self._asked_at >= BUSY_STEPS):
            self._is_asked, self._asked_at, self._was_idle = True, steps, is_idle
            self._order({"known": self._known, "is_idle": is_idle})

    def next_due(self, steps: int) -> float:
        """When an idle engine next has an order to give."""
        if self._is_asked or self._quiet_since is None or self._settled_at == steps:
            return float("inf")
        return self._quiet_since + QUIET_S

    def answered(self, found: Sequence[dict[str, Any]], error: str) -> None:
        """The workers have carried out the order. Raises EngineError when one failed: workers may no longer be alike."""
        self._is_asked = False
        if error:
            raise EngineError(f"the workers could not change what they have captured: {error}")
        is_first, first = self._known is None, found[0]
        self._known = {
            "held": max(each["held"] for each in found),
            "growth": max(each["growth"] for each in found),
            "most_bytes": max(each["most_bytes"] for each in found),
            "capture_s": max(each["capture_s"] for each in found),
            "row_s": min(each["row_s"] for each in found),
        }
        self.counts = {name: int(first[key]) for key, name in COUNTS.items()}
        if self._was_idle and not is_first and not first["done"]:
            self._settled_at = self._asked_at
        self._tell(first)

    def _tell(self, first: dict[str, Any]) -> None:
        assert self._known is not None
        log.debug(
            "captures %s", facts(done=first["done"] or "nothing", idle=self._was_idle, **self._known, **self.counts)
        )
        held, growth, most = (int(self._known[name]) for name in ("held", "growth", "most_bytes"))
        if held + growth > most and not self._is_full:
            self._is_full = True  # logged once
            log.warning(
                "no more graphs are captured: they hold what they may %s",
                facts(held=format_bytes(held), next=format_bytes(growth), most=format_bytes(most)),
            )

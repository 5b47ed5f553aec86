"""Changes of what is captured while a worker serves: one at a time, when the engine orders it, the same on all ranks.

Owned by workers.cuda.worker. What is decided depends on the plans seen and on the order's arguments alone, which are the same
everywhere; what was measured here goes back to the engine (engine_core.lifecycle.graph_capture), and comes with the next order
as what all workers agree on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from trireme.workers.cuda.graph_policy import Change, Size
from trireme.workers.cuda.graphs import DecodeGraphs, GraphMemory, GraphSet, MixedGraphs

Known = Mapping[str, float]
"""Of all workers: the most bytes that graphs hold (held), that another size takes (growth) and that graphs may hold (most_bytes),
what a capture takes (capture_s), and what a row of padding costs at least (row_s)."""


class Adaptation:
    """What the device does for a change happens inside `together()`. With `is_alone` nobody waits for this worker, so that a change
    may end where memory does."""

    def __init__(
        self,
        decodes: DecodeGraphs,
        mixed: MixedGraphs,
        memory: GraphMemory,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        is_alone: bool = True,
    ) -> None:
        self._decodes, self._sets, self._memory = decodes, (decodes.set, mixed.set), memory
        self._is_alone, self._together = is_alone, together
        self._row_s: float | None = None

    def adapt(self, known: Known | None, *, is_idle: bool) -> dict[str, Any]:
        """Makes the best change there is, if it is worth it, and tells what was done and measured. While requests wait (not
        `is_idle`) a change must save more than it costs, over steps as they were lately. Every earlier step is waited for first."""
        done = ""
        if self._row_s is None:
            with self._together():
                self._row_s = self._decodes.seconds_per_row()
            done = "measured"
        elif known and (found := self._best(known, is_idle=is_idle)) is not None:
            with self._together():
                done = self._carry_out(*found, int(known["held"]))
        return {**self.report(), "done": done}

    def report(self) -> dict[str, Any]:
        """Counts, and what other workers should know."""
        memory, sets = self._memory, self._sets
        return {
            "captured": sum(graphs.num_captured for graphs in sets),
            "dropped": sum(graphs.num_dropped for graphs in sets),
            "replays": sum(graphs.num_replays for graphs in sets),
            "padded": sum(graphs.num_padded for graphs in sets),
            "most_bytes": memory.most_bytes,
            "held": memory.held,
            "growth": memory.growth,
            "capture_s": memory.capture_s,
            "row_s": self._row_s or 0.0,
        }

    def _best(self, known: Known, *, is_idle: bool) -> tuple[GraphSet, Change] | None:
        """The change of either kind that saves most; one that gives memory back goes first."""
        least = 0
        if not is_idle:
            if not known["row_s"] > 0:
                return None
            least = int(known["capture_s"] / known["row_s"])
        held, growth, most = (int(known[name]) for name in ("held", "growth", "most_bytes"))
        found = [
            (graphs, change)
            for graphs in self._sets
            if (change := graphs.policy.change(held, growth, most, least_gain=least)) is not None
        ]
        return max(found, key=lambda each: (each[1].add is None, each[1].gain), default=None)

    def _carry_out(self, graphs: GraphSet, change: Change, held: int) -> str:
        done = []
        if change.drop is not None:
            graphs.drop(change.drop, held=None if change.add else held)
            done.append(f"drop {_name(change.drop)}")
        if change.add is not None:
            try:
                graphs.add(change.add)
                done.append(f"add {_name(change.add)}")
            except torch.OutOfMemoryError:
                if not self._is_alone:
                    raise
                self._memory.growth = self._memory.most_bytes + 1  # no more
                done.append(f"no memory for {_name(change.add)}")
        return ", ".join(done)


def _name(size: Size) -> str:
    """40; 8+128 with prompts."""
    return "+".join(map(str, size))

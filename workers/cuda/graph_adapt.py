"""Changes the captured CUDA graphs while a worker serves: one at a time, when the engine orders it, the same on all ranks.

Owned by workers.cuda.worker. Decisions depend only on the plans seen and the order's arguments, which are the same
everywhere; measurements made here go back to the engine (engine_core.lifecycle.graph_capture), and come with the next order
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
"""Maxima over all workers: bytes that graphs hold (held), that another size takes (growth) and that graphs may hold (most_bytes),
and seconds of a capture (capture_s); the minimum of the seconds per padded slot (row_s)."""


class Adaptation:
    """Device work of a change runs inside `together()`. With `is_alone` no rank waits for this worker, so that a change may
    stop when memory runs out."""

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
        """Makes the best change if it is worth it, and returns what was done and measured. While requests wait (not `is_idle`) a
        change must save more than it costs, over steps like the recent ones. Waits for every earlier step first."""
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
        """Counts, and the measurements for the other workers."""
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
        """The change of either kind that saves most; one that frees memory goes first."""
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
                self._memory.growth = self._memory.most_bytes + 1  # no more captures
                done.append(f"no memory for {_name(change.add)}")
        return ", ".join(done)


def _name(size: Size) -> str:
    """`40`, or `8+128 with prompts`."""
    return "+".join(map(str, size))

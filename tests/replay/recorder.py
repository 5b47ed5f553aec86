"""Records what happens to an engine core, and writes the recorded traces that test_replay.py compares with.

`python -m tests.replay.recorder` writes them anew: only when a change means to alter plans, and says so.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trireme.engine_core.core import EngineCore
from trireme.engine_core.events import (
    Aborted,
    Answered,
    Began,
    Event,
    FrontGone,
    Planned,
    Submitted,
    Ticked,
    log_from_events,
    plans_of,
)
from trireme.transport.wire.messages import StepPlan, StepResult, Submit

TRACES = Path(__file__).parent / "traces"
SEEDS = (1, 2, 3, 4)  # the even ones plan ahead


class Recorder:
    """Stands before a core and keeps every event; everything else is the core's own."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.events: list[Event] = [Began(core.limits, core.scheduler.depth, "fcfs", core.scheduler.ahead)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def submit(self, front: str, submit: Submit, now: float) -> None:
        self.events.append(Submitted(now, front, submit))
        self._core.submit(front, submit, now)

    def abort(self, front: str, rids: Sequence[int]) -> None:
        self.events.append(Aborted(front, list(rids)))
        self._core.abort(front, rids)

    def front_gone(self, front: str) -> None:
        self.events.append(FrontGone(front))
        self._core.front_gone(front)

    def tick(self, now: float) -> None:
        self.events.append(Ticked(now))
        self._core.tick(now)

    def on_result(self, result: StepResult, now: float) -> None:
        self.events.append(Answered(now, result))
        self._core.on_result(result, now)

    def next_plan(self, now: float) -> StepPlan | None:
        self.events.append(Planned(now))
        return self._core.next_plan(now)


def digests(plans: list[bytes]) -> str:
    """One short digest per line and plan, so that the first difference has a number."""
    return "".join(hashlib.sha256(plan).hexdigest()[:12] + "\n" for plan in plans)


def record(seed: int) -> list[Event]:
    """A crowded random scene of the stateful tests, as events."""
    from tests.unit.test_core_stateful import Scene

    scene = Scene(random.Random(seed), ahead=seed % 2 == 0)
    scene.events.remove(scene.forget_prefixes)
    scene.weights.pop()
    recorder = Recorder(scene.driver.core)
    scene.driver.core = recorder  # type: ignore[assignment]
    for _ in range(120):
        scene.one_event()
    scene.finish()
    return recorder.events


def main() -> None:
    TRACES.mkdir(exist_ok=True)
    for seed in SEEDS:
        events = record(seed)
        (TRACES / f"scene-{seed}.events").write_bytes(zlib.compress(log_from_events(events), 9))
        (TRACES / f"scene-{seed}.plans").write_text(digests(plans_of(events)))


if __name__ == "__main__":
    main()

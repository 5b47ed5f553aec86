"""When an engine takes its next step: whenever it has work (Independent), or when all engines that share its collectives do
(Lockstep).

Used by EngineLoop, which knows no difference. Both pause in three ways: rows that have begun end at once (abort), end first (wait),
or stay as they are (keep); rows that come meanwhile wait. No socket, no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from trireme.engine_core.core import EngineCore
from trireme.engine_core.lifecycle.wave import Wave
from trireme.engine_core.stall import LATE_S
from trireme.errors import EngineError
from trireme.topology.lockstep import Mode, paused
from trireme.transport.wire.messages import StepPlan, StepResult, WaveOrder, WaveReport

Answer: TypeAlias = Callable[[str], object]
"""Takes the error, "" for success."""

ABORTED = "the engine was paused, and what ran was ended; try again"


class Stepping(Protocol):
    """What the loop asks before and after every step."""

    @property
    def mode(self) -> Mode: ...

    @property
    def can_shut_down(self) -> bool:
        """Nobody waits for this engine's next step."""
        ...

    @property
    def has_step(self) -> bool:
        """There is a step to take, and nobody else to wait for."""
        ...

    @property
    def most_tokens(self) -> int:
        """How large a step may be in other engines that take it too; 0: there are none."""
        ...

    def stall_reason(self, now: float) -> str:
        """Why rows that wait here do not run, although this engine could."""
        ...

    def welcome(self) -> None:
        """The coordinator is new or back."""
        ...

    def on_order(self, order: WaveOrder) -> None: ...

    def next_plan(self, now: float) -> StepPlan | None: ...

    def on_result(self, result: StepResult) -> None: ...

    def direct(self, mode: Mode, answer: Answer) -> None:
        """Pauses, or with "" goes on; answers when that is so."""
        ...

    def settle(self) -> None:
        """Says what there is to say after a turn."""
        ...


class Independent:
    """A dense engine: its steps are its own affair."""

    most_tokens = 0
    can_shut_down = True

    def __init__(self, core: EngineCore, mode: Mode = "", tell: Callable[[Mode], object] | None = None) -> None:
        """Begins in the pause that its former life was in. `tell` is told of each that follows, for the next one."""
        self._core = core
        self._tell = tell
        self._waiting: list[Answer] = []
        self.mode = mode
        enter(core, mode)

    @property
    def has_step(self) -> bool:
        if self.mode == "":
            return bool(self._core.requests)
        return self.mode == "wait" and self._core.scheduler.num_begun > 0

    def stall_reason(self, now: float) -> str:
        return paused(self.mode)

    def welcome(self) -> None:
        pass

    def on_order(self, order: WaveOrder) -> None:
        pass

    def next_plan(self, now: float) -> StepPlan | None:
        return None if self.mode in ("keep", "abort") else self._core.next_plan(now)

    def on_result(self, result: StepResult) -> None:
        pass

    def direct(self, mode: Mode, answer: Answer) -> None:
        for waiting in self._waiting:
            waiting("another pause or resume came in between")
        self._waiting = [answer]
        self.mode = mode
        if self._tell is not None:
            self._tell(mode)
        enter(self._core, mode)

    def settle(self) -> None:
        if self._waiting and self._is_settled():
            waiting, self._waiting = self._waiting, []
            for answer in waiting:
                answer("")

    def _is_settled(self) -> bool:
        scheduler = self._core.scheduler
        return self.mode == "" or not (scheduler.in_flight or (self.mode == "wait" and scheduler.num_begun))


class Lockstep:
    """An engine in lock step. `tell` gives a report to the coordinator; False: it is away, and is told when it comes back."""

    def __init__(self, core: EngineCore, wave: Wave, tell: Callable[[WaveReport], bool]) -> None:
        self._core = core
        self._wave = wave
        self._tell = tell
        self._wants_since: float | None = None
        self.most_tokens = core.limits.max_num_tokens

    @property
    def mode(self) -> Mode:
        return self._wave.mode

    @property
    def can_shut_down(self) -> bool:
        return not self._wave.running

    @property
    def has_step(self) -> bool:
        return self._wave.may_vote

    def stall_reason(self, now: float) -> str:
        begun, queued = self._rows()
        if self._wave.running or not self._wave.wants_wave(begun, queued):
            self._wants_since = None
            return paused(self._wave.mode)
        if self._wants_since is None:
            self._wants_since = now
        waited_s = now - self._wants_since
        return f"the engines have not been ordered to step for {waited_s:.1f} s" if waited_s > LATE_S else ""

    def welcome(self) -> None:
        self._wave.welcome()

    def on_order(self, order: WaveOrder) -> None:
        if self._wave.on_order(order):
            enter(self._core, order.mode)

    def next_plan(self, now: float) -> StepPlan | None:
        """A step while a wave runs, with rows or without."""
        if not self._wave.may_vote:
            return None
        begun, queued = self._rows()
        ballot = self._wave.vote(begun=begun, queued=queued)
        plan = self._core.next_plan(now) or self._core.empty_plan(now)
        if plan is None:
            raise EngineError(f"step {ballot.step} of wave {ballot.wave} has no place behind those under way")
        return msgspec.structs.replace(plan, ballot=ballot)

    def on_result(self, result: StepResult) -> None:
        if result.agreed is None:
            raise EngineError(f"step {result.step} ended without what the engines agreed on")
        self._wave.on_agreed(result.agreed)

    def direct(self, mode: Mode, answer: Answer) -> None:
        answer("this engine steps together with others: the coordinator pauses them all")

    def settle(self) -> None:
        begun, queued = self._rows()
        report = self._wave.report(begun=begun, queued=queued)
        if report is not None and not self._tell(report):
            self._wave.welcome()

    def _rows(self) -> tuple[int, int]:
        """Rows that have begun, and those that have not."""
        begun = self._core.scheduler.num_begun
        return begun, len(self._core.requests) - begun


def enter(core: EngineCore, mode: Mode) -> None:
    """What a pause or a resume does to the rows of an engine."""
    core.scheduler.admits = mode == ""
    if mode == "abort":
        core.abort_all(ABORTED)

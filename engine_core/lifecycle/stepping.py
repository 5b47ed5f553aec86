"""When an engine takes its next step: whenever it has work (Independent), or together with all engines that share its collectives
(Lockstep).

EngineLoop uses both alike. Three ways to pause: running sequences end at once (abort), finish first (wait), or stay in place
(keep); sequences that arrive meanwhile wait. No socket, no clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
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

MOST_LATE = 1_000_000  # thousandths
ABORTED = "the engine was paused, and what ran was ended; try again"


class Stepping(Protocol):
    """What the loop asks before and after every step."""

    @property
    def mode(self) -> Mode: ...

    @property
    def can_shut_down(self) -> bool:
        """No other engine waits for this engine's next step."""
        ...

    @property
    def has_step(self) -> bool:
        """A step can be taken now without waiting for another engine."""
        ...

    @property
    def most_tokens(self) -> int:
        """Largest step (tokens) of the engines that step with this one; 0: there are none."""
        ...

    def stall_reason(self, now: float) -> str:
        """Why waiting sequences do not run although this engine could run them; "" when they do."""
        ...

    def welcome(self) -> None:
        """The coordinator is new or back."""
        ...

    def on_order(self, order: WaveOrder) -> None: ...

    def next_plan(self, now: float) -> StepPlan | None: ...

    def on_result(self, result: StepResult) -> None: ...

    def direct(self, mode: Mode, answer: Answer) -> None:
        """Pauses, or resumes with ""; answers when that is complete."""
        ...

    def settle(self) -> None:
        """Sends pending answers and reports after an iteration."""
        ...


class Independent:
    """A dense engine: steps whenever it has work."""

    most_tokens = 0
    can_shut_down = True

    def __init__(self, core: EngineCore, mode: Mode = "", tell: Callable[[Mode], object] | None = None) -> None:
        """Starts in the pause of its previous life. `tell` gets every later mode, for the next life."""
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
        """Changes the mode at once. Earlier callers still waiting get an error; `answer` gets "" when the new mode holds."""
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
    """A lockstep engine. `tell` sends a report to the coordinator; False: it is away, and is told when it comes back."""

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
        """The pause, or the seconds since a wave was needed once they exceed LATE_S; "" otherwise."""
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
        """While a wave runs, a step, or a dummy step when no sequence can run."""
        if not self._wave.may_vote:
            return None
        begun, queued = self._rows()
        scheduler = self._core.scheduler
        target_s = scheduler.tightest_target(scheduler.decode_batch)
        late = min(MOST_LATE, round(1000 * scheduler.lateness(now)))
        ballot = self._wave.vote(begun=begun, queued=queued)._replace(late_permille=late)
        if target_s < inf:
            ballot = ballot._replace(target_us=max(1, int(target_s * 1e6)))
        plan = self._core.next_plan(now) or self._core.empty_plan(now)
        if plan is None:
            raise EngineError(f"step {ballot.step} of wave {ballot.wave} has no place behind those under way")
        return msgspec.structs.replace(plan, ballot=ballot)

    def on_result(self, result: StepResult) -> None:
        if result.agreed is None:
            raise EngineError(f"step {result.step} ended without what the engines agreed on")
        self._wave.on_agreed(result.agreed)
        budget = self._core.scheduler.budget
        budget.peers_target_s = result.agreed.target_us / 1e6 or inf
        budget.agreed_late = result.agreed.late_permille / 1000

    def direct(self, mode: Mode, answer: Answer) -> None:
        answer("this engine steps together with others: the coordinator pauses them all")

    def settle(self) -> None:
        begun, queued = self._rows()
        report = self._wave.report(begun=begun, queued=queued)
        if report is not None and not self._tell(report):
            self._wave.welcome()

    def _rows(self) -> tuple[int, int]:
        """Counts of sequences that have begun, and of those that have not."""
        begun = self._core.scheduler.num_begun
        return begun, len(self._core.requests) - begun


def enter(core: EngineCore, mode: Mode) -> None:
    """Applies a pause or a resume to the sequences of an engine."""
    core.scheduler.admits = mode == ""
    if mode == "abort":
        core.abort_all(ABORTED)

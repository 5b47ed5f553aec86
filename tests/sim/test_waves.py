"""Waves, checked in every order of events: 3 ranks, 2 clients, pause and resume, crashes of the group and of the coordinator.

Then the same with one rule of the machines broken at a time, which the search must find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.sim.explore import Violation, explore
from tests.sim.wave_model import Setting, WaveModel
from trireme.coordinator.waves import Waves
from trireme.engine_core.lifecycle.wave import Wave
from trireme.topology.lockstep import Agreed, Ballot, agree
from trireme.transport.wire.messages import WaveOrder, WaveReport

ONE = ((0, 1),)
TWO = ((0, 1), (1, 1))
LONG = ((0, 2), (1, 1))
KEEP, WAIT = (("keep", ""),), (("wait", ""),)

# name -> (what happens outside, at least so many states)
SETTINGS = {
    "requests": (Setting(LONG), 2_500),
    "depth": (Setting(LONG, depth=2), 32_000),
    "keep": (Setting(TWO, KEEP), 99_000),
    "wait": (Setting(((0, 2),), WAIT), 5_600),
    "abort": (Setting(((0, 2),), (("abort", ""),)), 6_100),
    "depth, keep": (Setting(ONE, (("keep",),), depth=2), 48_000),
    "any order": (Setting(ONE, KEEP, in_order=False), 30_000),
    "crash": (Setting(TWO, crashes=1), 78_000),
    "coordinator": (Setting(TWO, restarts=1), 58_000),
    "keep, crash": (Setting(ONE, (("keep",),), crashes=1), 125_000),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_order_of_events_ends_well(name: str) -> None:
    setting, least = SETTINGS[name]
    seen = explore(WaveModel(setting), most=400_000)
    print(f"{name}: {seen}")
    assert seen.is_complete
    assert seen.num_states > least


# ---------------------------------------------------------------- broken rules


class EndsAlone(Wave):
    """One rank ends a wave by its own lights."""

    __slots__ = ()

    def ends(self, agreed: Agreed) -> bool:
        return self.rank == 0 or super().ends(agreed)


class NeverEnds(Wave):
    """Ranks go on until the end of time."""

    __slots__ = ()

    def ends(self, agreed: Agreed) -> bool:
        return agreed.is_ready


class IgnoresStartWhilePaused(Wave):
    """A rank that was told to pause does not begin what the others have begun."""

    __slots__ = ()

    def _begin(self) -> None:
        if self.admits:
            super()._begin()


class DropsStartWhileRunning(Wave):
    """An order for the next wave that comes before the end of this one is lost."""

    __slots__ = ()

    def on_order(self, order: WaveOrder) -> bool:
        if self.running:
            order = WaveOrder(order.epoch, self.wave, order.number, order.mode)
        return super().on_order(order)


class PausesAlone(Wave):
    """A rank stops as soon as it hears of the pause, whatever the others do."""

    __slots__ = ()

    @property
    def may_vote(self) -> bool:
        return self.admits and super().may_vote


class ReadyTooEarly(Wave):
    """A rank that should wait for its rows does not."""

    __slots__ = ()

    def is_ready(self, begun: int) -> bool:
        return not self.admits


class NeverReady(Wave):
    """A rank says no to every pause while it has rows."""

    __slots__ = ()

    def is_ready(self, begun: int) -> bool:
        return not self.admits and begun == 0 and self.rank != 1


class WantsWhilePaused(Wave):
    """A rank asks for a wave although it is paused."""

    __slots__ = ()

    def wants_wave(self, begun: int, queued: int) -> bool:
        return begun + queued > 0


class BeginsWhilePaused(Wave):
    """Rows that have not begun count as work during a pause."""

    __slots__ = ()

    def has_work(self, begun: int, queued: int) -> bool:
        return begun + queued > 0


class RunsOldWaves(Wave):
    """A late order sets off a wave that is over."""

    __slots__ = ()

    def _begin(self) -> None:
        if not self.running and self.ordered >= self.wave > 0:
            self.wave -= 1
        super()._begin()


class ObeysLateOrders(Wave):
    """A pause that was taken back long ago holds again."""

    __slots__ = ()

    def on_order(self, order: WaveOrder) -> bool:
        self.number = min(self.number, order.number - 1)
        return super().on_order(order)


class SilentToNewcomers(Wave):
    """A new coordinator is told nothing."""

    __slots__ = ()

    def welcome(self) -> None:
        pass


class ExcludesTheWaker(Waves):
    """The rank that asked for the wave is believed to run already."""

    __slots__ = ()

    def is_behind(self, rank: int, order: WaveOrder) -> bool:
        report = self.reports[rank]
        return super().is_behind(rank, order) and not (report is not None and report.wants)


class NeverStartsTheFirst(Waves):
    """Wave 0 is taken for running."""

    __slots__ = ()

    def may_start(self) -> bool:
        return self.wave > 0 and super().may_start()


class StartsWithoutAll(Waves):
    """A wave begins although a rank is not there yet."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return True


class StartsUnderAnOldMode(Waves):
    """A rank is given its wave although it asked before it knew of the pause."""

    __slots__ = ()

    def needs_wave(self, report: WaveReport) -> bool:
        return report.wants


class TakesOldReportsForStill(Waves):
    """A rank that has yet to hear of its wave counts as parked."""

    __slots__ = ()

    def is_current(self, report: WaveReport) -> bool:
        return not report.is_running and report.number == self.number


class TellsOnce(Waves):
    """What a rank was told once, it is never told again."""

    __slots__ = ()

    def is_behind(self, rank: int, order: WaveOrder) -> bool:
        return self.told[rank] is None and super().is_behind(rank, order)


class ForgetsWaves(Waves):
    """A new coordinator begins to count at nought, whatever ranks report."""

    __slots__ = ()

    def reported(self, report: WaveReport) -> None:
        wave = self.wave
        super().reported(report)
        if self.wave == report.wave:
            self.wave = wave


class ForgetsPauses(Waves):
    """A new coordinator does not take a pause over."""

    __slots__ = ()

    def reported(self, report: WaveReport) -> None:
        number, mode = self.number, self.mode
        super().reported(report)
        self.number, self.mode = number, mode


class KeepsTheDead(Waves):
    """A group that starts again is taken for the one that died."""

    __slots__ = ()

    def connected(self, rank: int, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch = epoch
        super().connected(rank, epoch)


def all_have_work(ballots: Sequence[Ballot]) -> Agreed:
    """Ends with the first rank that has nothing to do."""
    return agree(ballots)._replace(has_work=all(ballot.has_work for ballot in ballots))


def one_is_ready(ballots: Sequence[Ballot]) -> Agreed:
    """One rank pauses all."""
    return agree(ballots)._replace(is_ready=any(ballot.is_ready for ballot in ballots))


BROKEN: dict[str, tuple[Setting, dict[str, Any]]] = {
    "ends alone": (Setting(((1, 2),)), {"wave": EndsAlone}),
    "never ends": (Setting(ONE), {"wave": NeverEnds}),
    "ignores start while paused": (Setting(((0, 1), (0, 1)), KEEP), {"wave": IgnoresStartWhilePaused}),
    "drops start while running": (Setting(LONG), {"wave": DropsStartWhileRunning}),
    "pauses alone": (Setting(ONE, KEEP), {"wave": PausesAlone}),
    "ready too early": (Setting(((0, 2),), WAIT), {"wave": ReadyTooEarly}),
    "never ready": (Setting(((0, 2),), KEEP), {"wave": NeverReady}),
    "wants while paused": (Setting(ONE, KEEP), {"wave": WantsWhilePaused}),
    "begins while paused": (Setting(ONE, WAIT), {"wave": BeginsWhilePaused}),
    "runs old waves": (Setting(LONG), {"wave": RunsOldWaves}),
    "obeys late orders": (Setting(ONE, KEEP, in_order=False), {"wave": ObeysLateOrders}),
    "silent to newcomers": (Setting(ONE, restarts=1), {"wave": SilentToNewcomers}),
    "excludes the waker": (Setting(ONE), {"waves": ExcludesTheWaker}),
    "never starts the first": (Setting(ONE), {"waves": NeverStartsTheFirst}),
    "starts without all": (Setting(ONE, crashes=1), {"waves": StartsWithoutAll}),
    "starts under an old mode": (Setting(ONE, KEEP), {"waves": StartsUnderAnOldMode}),
    "takes old reports for still": (Setting(ONE, KEEP), {"waves": TakesOldReportsForStill}),
    "tells once": (Setting(ONE, KEEP), {"waves": TellsOnce}),
    "forgets waves": (Setting(TWO, restarts=1), {"waves": ForgetsWaves}),
    "forgets pauses": (Setting(ONE, (("keep",),), restarts=1), {"waves": ForgetsPauses}),
    "keeps the dead": (Setting(TWO, crashes=1), {"waves": KeepsTheDead}),
    "all have work": (Setting(LONG), {"agreement": all_have_work}),
    "one is ready": (Setting(ONE, KEEP), {"agreement": one_is_ready}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found_out(name: str) -> None:
    setting, fault = BROKEN[name]
    with pytest.raises(Violation) as caught:
        explore(WaveModel(setting, **fault), most=200_000)
    assert caught.value.trace
    print(caught.value)

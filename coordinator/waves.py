"""Waves: which wave the ranks of a lock-step group shall run, and whether they shall pause. Pure. Used by core.py.

Orders and reports are states and not changes, so any of them may be late, repeated or lost with a coordinator: what is not as
ordered is ordered again. A new coordinator orders nothing new until every rank has reported, so nothing it does rests on a guess.
"""

from __future__ import annotations

from trireme.topology.lockstep import Mode
from trireme.transport.wire.messages import WaveOrder, WaveReport


class Waves:
    """One group of `num_ranks` engines. They live and die together: the highest epoch seen is that of the group."""

    __slots__ = ("_serial", "epoch", "mode", "number", "reports", "told", "wave")

    def __init__(self, num_ranks: int, serial: int = 0) -> None:
        """`serial` is the coordinator's own epoch: its pauses and resumes count above those of its predecessors."""
        self._serial = serial << 32
        self.epoch = -1
        self.wave = 0  # the latest that was ever ordered, as far as we know
        self.number = 0
        self.mode: Mode = ""
        self.reports: tuple[WaveReport | None, ...] = (None,) * num_ranks
        self.told: tuple[WaveOrder | None, ...] = (None,) * num_ranks

    # ------------------------------------------------------------ events

    def connected(self, rank: int, epoch: int) -> None:
        """The rank said Hello: it reports next, and may have missed what it was told before."""
        if epoch > self.epoch:
            self.epoch, self.wave = epoch, 0
            self.reports = self.told = (None,) * len(self.reports)
        if epoch == self.epoch:
            self._set(rank, None, None)

    def lost(self, rank: int, epoch: int) -> None:
        if epoch == self.epoch:
            self._set(rank, None, None)

    def reported(self, report: WaveReport) -> None:
        if report.epoch != self.epoch:
            return
        self._set(report.engine, report, self.told[report.engine])
        self.wave = max(self.wave, report.wave)
        if report.number > self.number:
            self.number, self.mode = report.number, report.mode
        if self.may_start():
            self.wave += 1

    def direct(self, mode: Mode) -> int:
        """Pauses, or with "" resumes. The number to ask `standing` for."""
        self.number, self.mode = max(self._serial, self.number) + 1, mode
        if self.may_start():
            self.wave += 1
        return self.number

    # ------------------------------------------------------------ what follows

    def orders(self) -> list[tuple[int, WaveOrder]]:
        """What ranks must be told now, once."""
        order = WaveOrder(self.epoch, self.wave, self.number, self.mode)
        found = [rank for rank, report in enumerate(self.reports) if report is not None and self.is_behind(rank, order)]
        for rank in found:
            self._set(rank, self.reports[rank], order)
        return [(rank, order) for rank in found]

    def standing(self, number: int) -> bool | None:
        """Whether that pause or resume is complete on all ranks; None when a later one has taken its place."""
        if number != self.number:
            return None
        return all(report is not None and self.is_settled(report) for report in self.reports)

    @property
    def is_complete(self) -> bool:
        return None not in self.reports

    @property
    def is_parked(self) -> bool:
        """By the word of every rank: all have ended the latest wave."""
        return all(report is not None and not report.is_running and report.wave == self.wave for report in self.reports)

    # ------------------------------------------------------------ rules

    def may_start(self) -> bool:
        """The next wave: every rank is there, and one of them is past the last one and has work under the mode that holds."""
        return self.is_complete and any(report is not None and self.needs_wave(report) for report in self.reports)

    def needs_wave(self, report: WaveReport) -> bool:
        return report.wants and self.is_current(report)

    def is_current(self, report: WaveReport) -> bool:
        """The rank has ended all that was ordered, and knows the mode that holds."""
        return not report.is_running and report.wave == self.wave and report.number == self.number

    def is_settled(self, report: WaveReport) -> bool:
        """A pause is complete where nothing can run any more (who still needs a wave has been given one), a resume where it is
        known."""
        if self.mode == "":
            return report.number == self.number
        return self.is_current(report)

    def is_behind(self, rank: int, order: WaveOrder) -> bool:
        """Whether the rank has yet to hear of this order."""
        report, told = self.reports[rank], self.told[rank]
        if told is not None:
            return told != order
        return report is not None and (report.wave, report.number) != (order.wave, order.number)

    def _set(self, rank: int, report: WaveReport | None, told: WaveOrder | None) -> None:
        self.reports = (*self.reports[:rank], report, *self.reports[rank + 1 :])
        self.told = (*self.told[:rank], told, *self.told[rank + 1 :])

"""Waves: which wave the ranks of a lockstep group run, and whether they pause. Pure. Used by core.py.

Orders and reports are states, not changes, so any of them may be late, repeated or lost with a coordinator: any difference from
the order is ordered again. A new coordinator orders nothing new until every rank has reported, so it acts only on complete
reports.
"""

from __future__ import annotations

from trireme.topology.lockstep import Mode
from trireme.transport.wire.messages import WaveOrder, WaveReport


class Waves:
    """One group of `num_ranks` engines. They live and die together: the highest epoch seen is the group's."""

    __slots__ = ("_serial", "epoch", "mode", "number", "reports", "told", "wave")

    def __init__(self, num_ranks: int, serial: int = 0) -> None:
        """`serial` is the coordinator's own epoch: its pauses and resumes supersede those of its predecessors."""
        self._serial = serial << 32
        self.epoch = -1
        self.wave = 0  # the latest ever ordered, as far as known
        self.number = 0
        self.mode: Mode = ""
        self.reports: tuple[WaveReport | None, ...] = (None,) * num_ranks
        self.told: tuple[WaveOrder | None, ...] = (None,) * num_ranks

    # ------------------------------------------------------------ events

    def connected(self, rank: int, epoch: int) -> None:
        """The rank said Hello: it reports next, and may have missed earlier orders."""
        if epoch > self.epoch:
            self.epoch, self.wave = epoch, 0
            self.reports = self.told = (None,) * len(self.reports)
        if epoch == self.epoch:
            self._set(rank, None, None)

    def lost(self, rank: int, epoch: int) -> None:
        if epoch == self.epoch:
            self._set(rank, None, None)

    def reported(self, report: WaveReport) -> None:
        """Applies a rank's report (other epochs are ignored) and starts the next wave when it is due."""
        if report.epoch != self.epoch:
            return
        self._set(report.engine, report, self.told[report.engine])
        self.wave = max(self.wave, report.wave)
        if report.number > self.number:
            self.number, self.mode = report.number, report.mode
        if self.may_start():
            self.wave += 1

    def direct(self, mode: Mode) -> int:
        """Pauses, or resumes with "". Returns the number to pass to `standing`."""
        self.number, self.mode = max(self._serial, self.number) + 1, mode
        if self.may_start():
            self.wave += 1
        return self.number

    # ------------------------------------------------------------ consequences

    def orders(self) -> list[tuple[int, WaveOrder]]:
        """The orders that ranks must get now; each is returned once."""
        order = WaveOrder(self.epoch, self.wave, self.number, self.mode)
        found = [rank for rank, report in enumerate(self.reports) if report is not None and self.is_behind(rank, order)]
        for rank in found:
            self._set(rank, self.reports[rank], order)
        return [(rank, order) for rank in found]

    def standing(self, number: int) -> bool | None:
        """Whether that pause or resume is complete on all ranks; None when a later one has superseded it."""
        if number != self.number:
            return None
        return all(report is not None and self.is_settled(report) for report in self.reports)

    @property
    def is_complete(self) -> bool:
        return None not in self.reports

    @property
    def is_parked(self) -> bool:
        """Whether all ranks have reported the end of the latest wave."""
        return all(report is not None and not report.is_running and report.wave == self.wave for report in self.reports)

    # ------------------------------------------------------------ rules

    def may_start(self) -> bool:
        """Whether the next wave is due: every rank is present, and one has ended the last wave and has work in this mode."""
        return self.is_complete and any(report is not None and self.needs_wave(report) for report in self.reports)

    def needs_wave(self, report: WaveReport) -> bool:
        return report.wants and self.is_current(report)

    def is_current(self, report: WaveReport) -> bool:
        """The rank has ended all ordered waves and knows the current mode."""
        return not report.is_running and report.wave == self.wave and report.number == self.number

    def is_settled(self, report: WaveReport) -> bool:
        """A pause is complete once nothing can run (a rank that still needed a wave has had one), a resume once it is known."""
        if self.mode == "":
            return report.number == self.number
        return self.is_current(report)

    def is_behind(self, rank: int, order: WaveOrder) -> bool:
        """Whether the rank has not received this order yet."""
        report, told = self.reports[rank], self.told[rank]
        if told is not None:
            return told != order
        return report is not None and (report.wave, report.number) != (order.wave, order.number)

    def _set(self, rank: int, report: WaveReport | None, told: WaveOrder | None) -> None:
        self.reports = (*self.reports[:rank], report, *self.reports[rank + 1 :])
        self.told = (*self.told[:rank], told, *self.told[rank + 1 :])

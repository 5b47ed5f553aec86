"""Wave: one rank's view of stepping together with its lockstep peers. Pure; EngineLoop carries it out.

A wave is a run of steps that every rank takes. The coordinator starts it; it ends when all ranks agree, from the ballots gathered
in one step: when none has work, or when all are ready to pause. No rank decides alone.

    parked --(order names a later wave)--> running --(the agreed last step is over)--> parked
"""

from __future__ import annotations

from trireme.topology.lockstep import Agreed, Ballot, Mode
from trireme.transport.wire.messages import WaveOrder, WaveReport


class Wave:
    """Up to `depth` steps may be voted on before the first is agreed, so a wave ends `depth` - 1 steps after the agreement."""

    __slots__ = (
        "_reported",
        "agreed",
        "depth",
        "epoch",
        "last",
        "mode",
        "number",
        "ordered",
        "rank",
        "running",
        "voted",
        "wave",
    )

    def __init__(self, rank: int, epoch: int, depth: int = 1) -> None:
        self.rank = rank
        self.epoch = epoch
        self.depth = depth
        self.wave = 0  # the running wave, or the last one
        self.ordered = 0  # the latest wave ordered
        self.running = False
        self.voted = self.agreed = 0  # steps of this wave
        self.last: int | None = None  # its last step, once agreed
        self.number = 0  # of the pause or resume in force
        self.mode: Mode = ""
        self._reported: WaveReport | None = None

    @property
    def admits(self) -> bool:
        """Whether sequences that have not begun may begin."""
        return self.mode == ""

    # ------------------------------------------------------------ the coordinator

    def welcome(self) -> None:
        """A coordinator without knowledge of this rank has connected."""
        self._reported = None

    def on_order(self, order: WaveOrder) -> bool:
        """Applies an order; True if it changes the mode."""
        if order.epoch != self.epoch:
            return False
        self.ordered = max(self.ordered, order.wave)
        is_news = order.number > self.number
        if is_news:
            self.number, self.mode = order.number, order.mode
        self._begin()
        return is_news

    def report(self, *, begun: int, queued: int) -> WaveReport | None:
        """What the coordinator does not know yet, or None. `begun` sequences have run before, `queued` ones have not. The start of
        a wave is not reported to the coordinator that ordered it; only its end is news."""
        known = self._reported
        if self.running and known is not None and known.number == self.number:
            return None
        wants = not self.running and self.wants_wave(begun, queued)
        report = WaveReport(self.rank, self.epoch, self.wave, self.running, self.number, self.mode, wants)
        if report == known:
            return None
        self._reported = report
        return report

    # ------------------------------------------------------------ steps

    @property
    def may_vote(self) -> bool:
        """Whether there is a step to take now, dummy or not."""
        return self.running and self.voted - self.agreed < self.depth and self.voted != self.last

    def vote(self, *, begun: int, queued: int) -> Ballot:
        """This rank's ballot for the step it takes next. Requires `may_vote`."""
        assert self.may_vote, f"rank {self.rank} may not step"
        self.voted += 1
        return Ballot(self.wave, self.voted, self.has_work(begun, queued), self.is_ready(begun))

    def on_agreed(self, agreed: Agreed) -> None:
        """The oldest step in flight is over; `agreed` combines the ballots of all ranks."""
        self.agreed += 1
        if self.last is None and self.ends(agreed):
            self.last = self.agreed + self.depth - 1
        if self.agreed == self.last:
            self.running = False
            self._begin()

    # ------------------------------------------------------------ rules

    def has_work(self, begun: int, queued: int) -> bool:
        """Whether sequences can run. During a pause, none begins."""
        return begun > 0 or (self.admits and queued > 0)

    def wants_wave(self, begun: int, queued: int) -> bool:
        """Whether a parked rank needs the next wave. One that keeps its sequences through a pause does not."""
        return self.mode in ("", "wait") and self.has_work(begun, queued)

    def is_ready(self, begun: int) -> bool:
        """Whether this rank could pause after this step."""
        return not self.admits and (self.mode != "wait" or begun == 0)

    def ends(self, agreed: Agreed) -> bool:
        """Whether the wave ends; every rank decides alike from the same numbers."""
        return not agreed.has_work or agreed.is_ready

    def _begin(self) -> None:
        if not self.running and self.ordered > self.wave:
            self.wave, self.running = self.ordered, True
            self.voted, self.agreed, self.last = 0, 0, None

"""The end of an engine in good order: it takes new work for a while, finishes the rest until a deadline, then leaves. Pure."""

from __future__ import annotations

NEVER = float("inf")


class DrainTimes:
    """When new work is refused (`begins`) and when the engine leaves at the latest (`ends`), on the loop's clock. Of several orders
    the earliest times hold."""

    def __init__(self) -> None:
        self.begins = self.ends = NEVER

    def order(self, now: float, notice_s: float, deadline_s: float) -> None:
        """New work is taken for `notice_s` seconds more, and after that the rest has `deadline_s`."""
        self.begins = min(self.begins, now + notice_s)
        self.ends = min(self.ends, now + notice_s + deadline_s)

    def next_due(self, *, has_begun: bool) -> float:
        """When the engine next has something to do about it."""
        return self.ends if has_begun else self.begins

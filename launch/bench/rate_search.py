"""The search for the highest rate that passes a test, as a pure state machine: it asks for a rate and is told the verdict.

From a start it doubles while rates pass, or halves while they fail, then bisects on a logarithmic scale until the lowest failure is
within 5 % of the highest pass. Trusts each verdict: noise near the limit moves the result, but never keeps it from ending.
"""

from __future__ import annotations

import math

WITHIN = 0.05  # of the result: how much higher a failed rate may be
_DIGITS = 3  # of a rate in between; fewer could not tell two rates apart that are 5 % apart


class RateSearch:
    """`rate` is the next one to try, in requests per second; None when the search is over. `passed` is the highest rate that
    passed, 0.0 without any, and `failed` the lowest that failed, infinite without any."""

    def __init__(self, start: float, *, lowest: float, highest: float) -> None:
        """No rate is tried below `lowest` or above `highest`."""
        assert 0 < lowest <= start <= highest
        self.rate: float | None = start
        self.passed, self.failed = 0.0, math.inf
        self._lowest, self._highest = lowest, highest

    def note(self, *, is_passed: bool) -> None:
        """The verdict on `rate`; sets the next one."""
        rate = self.rate
        assert rate is not None
        if is_passed:
            self.passed = rate
        else:
            self.failed = rate
        if self.failed == math.inf:
            self.rate = min(2 * rate, self._highest) if rate < self._highest else None
        elif self.passed == 0.0:
            self.rate = max(rate / 2, self._lowest) if rate > self._lowest else None
        elif self.failed > self.passed * (1 + WITHIN):
            self.rate = rounded(math.sqrt(self.passed * self.failed))
        else:
            self.rate = None


def rounded(rate: float) -> float:
    """With as many digits as the search can tell apart."""
    return float(f"{rate:.{_DIGITS}g}")

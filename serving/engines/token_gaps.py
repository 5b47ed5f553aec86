"""Gaps between tokens: how long each token of a choice but its first came after the one before, counted by bucket.

Filled by serving/engines/client.py as an engine's messages arrive, so that a slow reader does not look like a slow engine; read by
serving/front.py for /metrics. Pure: the caller brings the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

NO_TOKEN_S = -1.0  # in place of the time of a choice's last token, before it has one


class TokenGaps:
    """`counts` has a number for each bucket, and a last one for gaps above every bound. Bounds are in seconds, each the upper
    one of its bucket."""

    __slots__ = ("_bounds_s", "counts", "total_s")

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.total_s = 0.0

    def add(self, now_s: float, num_by_last_s: Mapping[float, int]) -> None:
        """Tokens that arrived now, by when the one before of the same choice did. A choice's further tokens in one message
        follow without a gap: their time before is `now_s`."""
        for last_s, num in num_by_last_s.items():
            if last_s != NO_TOKEN_S:
                self.counts[bisect_left(self._bounds_s, now_s - last_s)] += num
                self.total_s += (now_s - last_s) * num

"""Multi-level feedback: short requests overtake long ones, without knowing which are short.

After FastServe (Wu et al., 2023): a request starts at the level that its prompt length gives (skip-join); each time it uses up the
quantum of its level while others wait, it loses its slot and drops one level, where quanta are twice as long. Waiting offsets
levels, as in Priority, so no request starves.
"""

from __future__ import annotations

from collections.abc import Sequence

from trireme.engine_core.scheduling.policies.base import Key, Lost, Policy, latest
from trireme.engine_core.scheduling.request import Request

QUANTUM = 64  # output tokens at the first level
NUM_LEVELS = 8


def quantum(level: int) -> int:
    return QUANTUM << level


def first_level(num_prompt: int) -> int:
    """The level whose quantum covers the prompt."""
    return min(NUM_LEVELS - 1, max(0, (num_prompt - 1) // QUANTUM).bit_length())


class Feedback(Policy):
    """`request.account.level` holds the level; 0 goes first."""

    takes_slots = True

    def key(self, request: Request) -> Key:
        return (self._level(request) * self.settings.aging_s + request.arrival_s,)

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        """The sequence with the fewest tokens to recompute, among those of the lowest level."""
        return min(candidates, key=lambda row: (-self._level(row), lost(row), *latest(row)))

    def is_spent(self, row: Request, head: Request) -> bool:
        level = self._level(row)
        return row.num_tokens - row.account.num_at_start >= quantum(level) and self._level(head) <= level

    def demote(self, row: Request) -> None:
        row.account.level = min(NUM_LEVELS - 1, self._level(row) + 1)

    def _level(self, request: Request) -> int:
        if request.account.level < 0:
            request.account.level = first_level(request.num_prompt)
        return request.account.level

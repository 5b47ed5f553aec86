"""Fair share: clients get equal service, however many requests each of them sends.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a counter per client of what
it was served, and the client with the smallest one goes first. A client that comes back has saved nothing up: its counter is
lifted to that of the others. While two clients always have requests queued, their counters differ by no more than what the rows
of a full batch can be served.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from trireme.engine_core.scheduling.policies.base import Lost, Policy, PolicySettings, latest
from trireme.engine_core.scheduling.request import Request

PROMPT_COST, OUTPUT_COST = 1.0, 2.0  # of a token; of prompts, only what was not in the prefix cache
MAX_CLIENTS = 10_000


class FairShare(Policy):
    """Lanes are clients, by `request.client`; those that name none share one lane."""

    is_metered = True

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self.counters: dict[Hashable, float] = {}
        self._forgotten = 0.0  # counter of those that have none

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        """Of the client that has had most, the row with least to compute again."""
        return min(candidates, key=lambda row: (-self.standing(row.client), lost(row), *latest(row)))

    def lane(self, request: Request) -> Hashable:
        return request.client

    def standing(self, lane: Hashable) -> float:
        return self.counters.get(lane, self._forgotten)

    def entered(self, lane: Hashable, floor: float) -> None:
        self.counters[lane] = max(floor, self.standing(lane))
        if len(self.counters) > MAX_CLIENTS:
            self._forget()

    def settle(self, rows: Iterable[Request]) -> None:
        for row in rows:
            served = 0.0
            if row.num_paid < 0:
                served = PROMPT_COST * (row.num_given - row.num_cached)
                row.num_paid = row.num_given
            if (count := row.num_tokens) > row.num_paid:
                served += OUTPUT_COST * (count - row.num_paid)
                row.num_paid = count
            if served:
                self.counters[row.client] = self.standing(row.client) + served

    def _forget(self) -> None:
        """Half of the clients, those that were served least. Should one of them come back, it counts as the last of them."""
        for client in sorted(self.counters, key=self.standing)[: MAX_CLIENTS // 2]:
            self._forgotten = max(self._forgotten, self.counters.pop(client))

"""Fair share: clients get equal service, however many requests each of them sends.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): one counter of service per
client, and the client with the smallest counter goes first. A returning client has no saved credit: its counter is raised to the
least of the active ones. While two clients always have requests queued, their counters differ by at most the service that the
sequences of a full batch can receive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from trireme.engine_core.scheduling.policies.base import Lost, Policy, PolicySettings, latest
from trireme.engine_core.scheduling.request import Request

PROMPT_COST, OUTPUT_COST = 1.0, 2.0  # per token; prompt tokens found in the prefix cache are free
MAX_CLIENTS = 10_000


class FairShare(Policy):
    """One lane per `request.client`; requests without a client share one lane."""

    is_metered = True

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self.counters: dict[Hashable, float] = {}
        self._forgotten = 0.0  # counter assumed for clients that were dropped

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        """The sequence with the fewest tokens to recompute, of the client with the most service."""
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
        """Charges prompt tokens once (without cached ones) and output tokens since the last call to their clients."""
        for row in rows:
            served, account = 0.0, row.account
            if account.num_paid < 0:
                served = PROMPT_COST * (account.num_given - row.stats.num_cached)
                account.num_paid = account.num_given
            if (count := row.num_tokens) > account.num_paid:
                served += OUTPUT_COST * (count - account.num_paid)
                account.num_paid = count
            if served:
                self.counters[row.client] = self.standing(row.client) + served

    def _forget(self) -> None:
        """Drops the least-served half of the clients. A dropped client that returns starts at the highest counter dropped."""
        for client in sorted(self.counters, key=self.standing)[: MAX_CLIENTS // 2]:
            self._forgotten = max(self._forgotten, self.counters.pop(client))

"""Who goes first, and who has to yield: a policy is a key function and a victim rule.

Used by the scheduler and its queue, which know no policy by name. Pure: time is what the requests carry. A policy that needs no
more than a key and a victim is a few lines, as those below are; one that follows what was served overrides `lane` and what is
below it (engine_core/scheduling/policies/fair.py), one that takes slots away `is_spent`
(engine_core/scheduling/policies/feedback.py).

Policies of others: an entry point of the group `trireme.policies` that names a callable, from PolicySettings to a Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from trireme.engine_core.scheduling.request import Request
from trireme.registry import Registry

Key: TypeAlias = tuple[float, ...]
Lost: TypeAlias = Callable[[Request], int]
"""Tokens that a row would have to compute again."""


def latest(request: Request) -> Key:
    """Smaller for whoever came later."""
    return (-request.arrival_s, -request.arrival)


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`aging_s` of waiting are worth as much as one level of priority; `due_s` is the deadline of requests that name none."""

    aging_s: float = 10.0
    due_s: float = 60.0


class Policy:
    """First come, first served, and the base of all others."""

    is_metered = False  # wants to hear of every token served
    takes_slots = False  # rows may lose their slot to queued requests

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def key(self, request: Request) -> Key:
        """Its place in its lane, and among the running rows: smaller goes first, and of two alike the earlier arrival. Read when
        the request enters the queue, which it does again after a preemption, and kept until then. Always of one length."""
        return ()

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        """Which of the running rows (one at least) gives its blocks back. Here: the one with the fewest tokens to compute
        again; among equals the latest arrival."""
        return min(candidates, key=lambda row: (lost(row), *latest(row)))

    # ------------------------------------------------------------ lanes

    def lane(self, request: Request) -> Hashable:
        """Requests of one lane are ordered by key alone. Never changes."""
        return None

    def standing(self, lane: Hashable) -> float:
        """Its place among the lanes: smaller goes first. May only grow while requests wait in it."""
        return 0.0

    def entered(self, lane: Hashable, floor: float) -> None:
        """The first request queues in it. `floor` is the least standing of lanes that had requests."""

    def settle(self, rows: Iterable[Request]) -> None:
        """Accounts for what was computed for these rows since the last time (with `is_metered`)."""

    # ------------------------------------------------------------ slots

    def is_spent(self, row: Request, head: Request) -> bool:
        """Whether a running row has had enough and has to let `head`, the first of the queue, have its slot (with
        `takes_slots`). Asked only when no slot is free."""
        return False

    def demote(self, row: Request) -> None:
        """It is about to lose its slot because it `is_spent`."""


class Priority(Policy):
    """Smaller priorities first, as in vLLM. Waiting makes up for priority, and a row that has run before is one level ahead.

    All that waits ages alike, so the order of two requests never changes: no request is overtaken by one that arrives more than
    `aging_s` later per level between them.
    """

    def key(self, request: Request) -> Key:
        level = request.priority - (1 if request.num_preemptions else 0)
        return (level * self.settings.aging_s + request.arrival_s,)

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        return min(candidates, key=lambda row: (-row.priority, lost(row), *latest(row)))


class Deadline(Policy):
    """Earliest deadline first (Liu and Layland, 1973); the latest deadline yields."""

    def key(self, request: Request) -> Key:
        return (request.arrival_s + (request.due_s or self.settings.due_s),)

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        return max(candidates, key=lambda row: (self.key(row), row.arrival_s, row.arrival))


POLICIES: Registry[Callable[[PolicySettings], Policy]] = Registry(
    "scheduling policy",
    "trireme.policies",
    {
        "fcfs": "trireme.engine_core.scheduling.policies.base:Policy",
        "priority": "trireme.engine_core.scheduling.policies.base:Priority",
        "deadline": "trireme.engine_core.scheduling.policies.base:Deadline",
        "fair": "trireme.engine_core.scheduling.policies.fair:FairShare",
        "feedback": "trireme.engine_core.scheduling.policies.feedback:Feedback",
    },
)

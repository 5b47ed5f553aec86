"""Scheduling policies: a key function for the queue order and a victim rule for preemption.

Used by the scheduler and its queue, which know no policy by name. Pure: requests carry the time. A policy that needs only a key
and a victim is a few lines, like those below; one that follows the service received overrides `lane` and the methods after it
(engine_core/scheduling/policies/fair.py), one that takes slots away overrides `is_spent`
(engine_core/scheduling/policies/feedback.py).

Third-party policies: an entry point in group `trireme.policies` that names a callable from PolicySettings to a Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

import msgspec

from trireme.engine_core.scheduling.request import Request
from trireme.registry import Registry

Key: TypeAlias = tuple[float, ...]
Lost: TypeAlias = Callable[[Request], int]
"""Tokens that a sequence would have to compute again."""


def latest(request: Request) -> Key:
    """A key that is smaller for later arrivals."""
    return (-request.arrival_s, -request.arrival)


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """`aging_s` of waiting equal one level of priority; `due_s` is the deadline of requests that name none."""

    aging_s: float = 10.0
    due_s: float = 60.0


class Policy:
    """First come, first served; the base class of the others."""

    is_metered = False  # `settle` is called with every token served
    takes_slots = False  # sequences may lose their slot to queued requests
    shortest_first = True  # of the prompts in a step; False: they go in the order of `key`

    def __init__(self, settings: PolicySettings) -> None:
        self.settings = settings

    def key(self, request: Request) -> Key:
        """Position in its lane and among the running sequences: smaller goes first, ties by arrival. Read when the request enters
        the queue (again after a preemption), and kept until then. Always of the same length."""
        return ()

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        """The running sequence (of at least one) to preempt. Here: the one with the fewest tokens to recompute; among equals the
        latest arrival."""
        return min(candidates, key=lambda row: (lost(row), *latest(row)))

    # ------------------------------------------------------------ lanes

    def lane(self, request: Request) -> Hashable:
        """Requests of one lane are ordered by key alone. Constant for a request."""
        return None

    def standing(self, lane: Hashable) -> float:
        """Position among the lanes: smaller goes first. May only grow while requests wait in the lane."""
        return 0.0

    def entered(self, lane: Hashable, floor: float) -> None:
        """The first request queues in the lane. `floor` is the least standing of lanes that had requests."""

    def settle(self, rows: Iterable[Request]) -> None:
        """Charges the tokens computed for these sequences since the last call (with `is_metered`)."""

    # ------------------------------------------------------------ slots

    def is_spent(self, row: Request, head: Request) -> bool:
        """Whether a running sequence has used up its quantum and must give its slot to `head`, the first of the queue (with
        `takes_slots`). Asked only when no slot is free."""
        return False

    def demote(self, row: Request) -> None:
        """The sequence is about to lose its slot because it `is_spent`."""


class Priority(Policy):
    """Smaller priorities first, as in vLLM. Waiting offsets priority, and a sequence that has run before is one level ahead.

    All queued requests age alike, so the order of two requests never changes: no request is overtaken by one that arrives more than
    `aging_s` later per level between them.
    """

    shortest_first = False

    def key(self, request: Request) -> Key:
        level = request.priority - (1 if request.stats.num_preemptions else 0)
        return (level * self.settings.aging_s + request.arrival_s,)

    def victim(self, candidates: Sequence[Request], lost: Lost) -> Request:
        return min(candidates, key=lambda row: (-row.priority, lost(row), *latest(row)))


class Deadline(Policy):
    """Earliest deadline first (Liu and Layland, 1973); the latest deadline is preempted first."""

    shortest_first = False

    def key(self, request: Request) -> Key:
        return (request.arrival_s + (request.wait.due_s or self.settings.due_s),)

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

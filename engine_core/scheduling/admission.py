"""Queue admission: refuses requests whose expected wait exceeds the bound.

Used by core; pure, the time is an argument. An early refusal lets a client retry elsewhere; a refusal after a minute in the queue
has cost that minute. The wait follows from Little's law: queue length divided by the rate at which requests leave the queue; no
estimate of output lengths is needed. Only time with requests left waiting counts: a request that starts at once says nothing about
capacity. While the first batch has just been filled the measured rate is too high and the estimate too short; a request admitted on
that estimate is refused as soon as its wait turns out to exceed the bound by half.
"""

from __future__ import annotations

from collections import deque

from trireme.engine_core.scheduling.request import Request, State
from trireme.engine_core.scheduling.scheduler import Scheduler
from trireme.errors import OverloadedError, TargetsMissedError
from trireme.sizes import format_seconds

MOST_GAP_S = 10.0  # between two plans that counts as work: a longer gap (a pause) is not measured
LOOK_S = 0.5  # between two checks of queued requests
MOST_RETRY_S = 60.0  # told to a client at most; clients ignore more
NEWEST = 0.1  # weight of the newest step with prompt tokens
SLACK = 1.5  # times the bound, for queued requests: a noisy estimate must not end them


class ServiceRate:
    """Measured over the starts of the last four batches, since requests that start together also end together. `num_slots`: batch
    slots."""

    def __init__(self, num_slots: int) -> None:
        self._least = max(4, num_slots // 2)  # starts needed for an estimate
        self._most = max(16, 4 * num_slots)
        self._starts: deque[float] = deque()  # in seconds of busy time
        self._since = 0.0  # the start before them
        self.busy_s = 0.0  # up to the last plan: time in which the engine worked and requests had to wait
        self.is_busy = False  # the last plan left requests waiting
        self._at = 0.0

    def planned(self, num_started: int, is_left_waiting: bool, now: float) -> None:
        """A step was planned in which `num_started` queued requests start; `is_left_waiting`: others remained queued."""
        gap_s, self._at = now - self._at, now
        if self.is_busy and 0 < gap_s <= MOST_GAP_S:
            self.busy_s += gap_s
        if self.is_busy or is_left_waiting:
            if not self._starts:
                self._since = self.busy_s
            self._starts.extend([self.busy_s] * num_started)
            while len(self._starts) > self._most:
                self._since = self._starts.popleft()
        self.is_busy = is_left_waiting

    def wait_s(self, num_ahead: int) -> float:
        """Expected wait in seconds with `num_ahead` requests ahead; 0 while unknown."""
        if len(self._starts) < self._least:
            return 0.0
        return num_ahead * (self.busy_s - self._since) / len(self._starts)


class QueueAdmission:
    """Admission for one scheduler. `max_wait_s` is the bound; 0: unlimited."""

    def __init__(self, scheduler: Scheduler, max_wait_s: float) -> None:
        self._scheduler = scheduler
        self._max_wait_s = max_wait_s
        self._rate = ServiceRate(scheduler.limits.max_num_seqs)
        self._next_look = 0.0
        self._prompt_s = self._prompt_tokens = 0.0  # of a step with prompt tokens, lately

    def planned(self, num_started: int, now: float) -> None:
        """The scheduler has planned a step in which `num_started` requests start."""
        if self._max_wait_s:
            num_waiting = len(self._scheduler.waiting)
            if num_started or num_waiting or self._rate.is_busy:
                self._rate.planned(num_started, num_waiting > 0, now)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step with `num_tokens` prompt tokens took `seconds`."""
        self._prompt_s += NEWEST * (seconds - self._prompt_s)
        self._prompt_tokens += NEWEST * (num_tokens - self._prompt_tokens)

    def check(self, request: Request) -> None:
        """Raises OverloadedError, with the seconds until there should be room, when a request about to be queued would exceed its
        bound, or when prompts and streams miss their targets already."""
        request.wait.since_busy_s = self._rate.busy_s
        if request.wait.bound_s > 0 and self._scheduler.misses_targets:
            self._check_targets()
        bound_s, waiting = min(request.wait.bound_s, self._max_wait_s), self._scheduler.waiting
        if bound_s <= 0 or self._rate.wait_s(len(waiting)) <= bound_s:
            return
        num_ahead = waiting.num_ahead(request)
        wait_s = self._rate.wait_s(num_ahead)
        if wait_s > bound_s:
            raise _too_long(f"{num_ahead} requests are queued before this one: ", wait_s, bound_s)

    def _check_targets(self) -> None:
        """Raises TargetsMissedError when the prompts ahead alone take longer than the target for the first token."""
        scheduler = self._scheduler
        num_tokens = scheduler.waiting.num_tokens + sum(row.num_left for row in scheduler.prefilling)
        seconds = num_tokens * self._prompt_s / max(self._prompt_tokens, 1.0)
        if seconds <= scheduler.limits.ttft_target:
            return
        raise TargetsMissedError(
            f"prompts wait longer than the target of {format_seconds(scheduler.limits.ttft_target)} although steps already take "
            f"longer than theirs; {num_tokens} prompt tokens are to be computed before, in about {format_seconds(seconds)}",
            retry_after_s=min(MOST_RETRY_S, max(1.0, seconds - scheduler.limits.ttft_target)),
            hint="--ttft-target, --itl-target",
        )

    def take_hopeless(self, now: float) -> list[tuple[Request, OverloadedError]]:
        """Queued requests whose expected wait now far exceeds their bound: from the end of the queue up to the first that does not,
        except those that have run or moved. They remain queued."""
        if not self._max_wait_s or now < self._next_look:
            return []
        self._next_look = now + LOOK_S
        waiting, policy, limit_s = self._scheduler.waiting, self._scheduler.policy, SLACK * self._max_wait_s
        each_s, position, busy_s = self._rate.wait_s(1), len(waiting), self._rate.busy_s
        oldest_s = max((busy_s - row.wait.since_busy_s for row in waiting), default=0.0)
        if oldest_s + position * each_s <= limit_s or not each_s:
            return []
        found = []
        for row in sorted(waiting, key=lambda row: (policy.standing(policy.lane(row)), row.key), reverse=True):
            position -= 1
            if row.state is State.WAITING and row.wait.bound_s > 0:
                wait_s = busy_s - row.wait.since_busy_s + position * each_s
                if wait_s <= limit_s:
                    break
                found.append((row, _too_long("others take longer than expected: ", wait_s, self._max_wait_s)))
        return found


def _too_long(why: str, wait_s: float, bound_s: float) -> OverloadedError:
    return OverloadedError(
        f"{why}it would wait about {wait_s:.0f} s; the limit is {bound_s:g} s",
        retry_after_s=min(MOST_RETRY_S, wait_s - bound_s),
        hint="--max-wait",
    )

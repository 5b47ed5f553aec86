"""Stall detection from step times alone. Pure: time is passed in, and so is what the system says of workers.

Used by core (StepTimes, fed with every step) and loop (StallWatch). A long but normal step is no stall: a step is late only after
one second and three times the usual time of its size. An unseen size is judged by the nearest smaller one, scaled by tokens; the
very first step only by FIRST_STEP_S. A worker that the system has stopped makes no progress, however long its step may take. Lost
time (LostTime) is charged to no step: when the loop itself did not run because the whole deployment was stopped, when a worker was
stopped, and when runnable workers had no processor. It makes no step late and does not enter the usual times. A late step makes the
engine not ready, and it may still recover; only a step stuck for `step_timeout` (and three times its usual time) fails the engine.
"""

from __future__ import annotations

from collections import deque

LATE_S = 1.0
AWAY_S = 2.0  # between two looks: this process itself was stopped
PATIENCE = 3.0  # times the usual duration
FIRST_STEP_S = 300.0  # the first step may compile, or touch all weights for the first time
FORGET = 0.98  # weight of a size's longest step after each further one


MOST_LOSSES = 1024  # the latest are remembered; a longer step may be blamed for more than its own time


class LostTime:
    """Time in which no step could progress. Readings of one clock, in seconds."""

    def __init__(self) -> None:
        self._total = 0.0
        self._points: deque[tuple[float, float]] = deque(maxlen=2 * MOST_LOSSES)  # (when, lost until then), both rising

    def __bool__(self) -> bool:
        return bool(self._points)

    def add(self, start: float, end: float, seconds: float) -> None:
        """Records that `seconds` of the interval `start`..`end` are lost; overlap with the last loss counts once."""
        if self._points:
            start = max(start, self._points[-1][0])
        seconds = min(seconds, end - start)
        if seconds > 0.0:
            self._points.append((start, self._total))
            self._total += seconds
            self._points.append((end, self._total))

    def since(self, when: float) -> float:
        """Seconds lost after `when`."""
        before: tuple[float, float] | None = None
        for point in reversed(self._points):
            if point[0] <= when:
                return self._total - _between(point, before, when)
            before = point
        return self._total - (before[1] if before is not None else 0.0)


def _between(point: tuple[float, float], after: tuple[float, float] | None, when: float) -> float:
    """Seconds lost until `when`, between two points of LostTime."""
    if after is None or after[0] <= point[0]:
        return point[1]
    return point[1] + (after[1] - point[1]) * (when - point[0]) / (after[0] - point[0])


class StepTimes:
    """The longest recent step of each size, in powers of two of tokens, and the lost time."""

    def __init__(self) -> None:
        self.lost = LostTime()
        self._longest: dict[int, float] = {}

    def own_s(self, began: float, now: float) -> float:
        """Seconds between `began` and `now` in which a step could progress."""
        seconds = now - began
        if self.lost:
            seconds -= self.lost.since(began)
        return seconds if seconds > 0.0 else 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Records a step of `num_tokens` tokens that took `seconds`."""
        size = max(1, num_tokens).bit_length()
        self._longest[size] = max(seconds, FORGET * self._longest.get(size, 0.0))

    def usual_s(self, num_tokens: int) -> float | None:
        """How long such a step usually takes at most, in seconds; None when no step has been seen."""
        known = [size for size in self._longest if size <= max(1, num_tokens).bit_length()]
        if not known:
            return min(self._longest.values(), default=None)  # a smaller step takes no longer
        nearest = max(known)
        scaled = self._longest[nearest] * num_tokens / (1 << nearest - 1)
        return max(scaled, *(self._longest[size] for size in known))


class StallWatch:
    """Call `look` on every iteration of the loop; then `stalled` says why there is no progress ("" when there is), and `stuck` why
    there will be none."""

    def __init__(self, times: StepTimes, step_timeout: float, *, most_tokens: int = 0) -> None:
        """A lockstep step may have up to `most_tokens` on another engine: it is given up no earlier than a step of that size."""
        self.stalled = ""
        self.stuck = ""
        self._times = times
        self._most_tokens = most_tokens
        self._step_timeout = step_timeout
        self._turned: float | None = None
        self._looked = self._back = 0.0  # the last look, and the first iteration after this process was stopped
        self._rested = 0.0  # when there was no complaint other than about a step

    def turn(self, now: float) -> None:
        """Call first in every iteration of the loop, so that steps ended meanwhile are timed correctly."""
        if self._turned is not None and now - self._turned > AWAY_S:
            self._times.lost.add(self._turned, now, now - self._turned)
            self._back = now
        self._turned = now

    def look(
        self, now: float, step: tuple[int, float, int] | None, *, has_work: bool, halted: str, starved_s: float = 0.0
    ) -> None:
        """`step`: the oldest one in flight (number, start, tokens). `halted`: the worker that the system has stopped.
        `starved_s`: seconds since the last look in which a runnable worker had no processor."""
        self.turn(now)
        is_back = self._back == now
        if halted:
            self._times.lost.add(self._looked, now, now - self._looked)
        elif starved_s:
            self._times.lost.add(now - max(starved_s, now - self._looked), now, starved_s)
        self._looked = now
        if is_back or (not halted and (step is not None or not has_work)):
            self._rested = now
        rested_s = now - self._rested
        self.stalled = self.stuck = ""
        if halted:
            self.stalled = halted
        elif step is None and has_work and rested_s > LATE_S:
            self.stalled = f"no step was planned for {rested_s:.1f} s although requests wait"
        if self.stalled and rested_s > self._step_timeout:
            self.stuck = self.stalled
        if step is not None:
            number, began, num_tokens = step
            self._look_at(number, self._times.own_s(max(began, self._back), now), num_tokens)

    def _look_at(self, number: int, age_s: float, num_tokens: int) -> None:
        usual_s = self._times.usual_s(num_tokens)
        longest_s = self._times.usual_s(max(num_tokens, self._most_tokens))
        if usual_s is None or longest_s is None:
            patience_s = max(self._step_timeout, FIRST_STEP_S)
        else:
            patience_s = max(self._step_timeout, PATIENCE * longest_s)
            if not self.stalled and age_s > max(LATE_S, PATIENCE * usual_s):
                self.stalled = f"step {number} has run for {age_s:.1f} s; one of its size takes {usual_s:.2f} s"
        if age_s > patience_s:
            self.stuck = f"step {number} has not ended after {age_s:.0f} s: a worker is stuck"

"""Whether an engine makes progress, judged by its steps alone. Pure: time is passed in, and so is what the system says of workers.

Used by core (StepTimes, fed with every step) and loop (StallWatch). A long honest step is no stall: a step is late only when
it has run for a second, and three times as long as steps of its size have taken. A step whose size was never seen is judged by
the nearest smaller one, scaled by its tokens; the very first one by nothing but FIRST_STEP_S. A worker that the system has
stopped makes no progress whatever its step may take. Time in which the loop itself did not turn, because the whole deployment
was stopped, counts against nobody. What is late makes the engine not ready, and may still recover; only
what has been stuck for `step_timeout` (and three times its usual time) is given up.
"""

from __future__ import annotations

LATE_S = 1.0
AWAY_S = 2.0  # between two looks: it was us who were stopped
PATIENCE = 3.0  # times the usual duration
FIRST_STEP_S = 300.0  # the first step may compile, or touch all weights for the first time
FORGET = 0.98  # what the longest step of a size counts after each other one


class StepTimes:
    """The longest recent step of each size, in powers of two of tokens."""

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens has ended after so long."""
        size = max(1, num_tokens).bit_length()
        self._longest[size] = max(seconds, FORGET * self._longest.get(size, 0.0))

    def usual_s(self, num_tokens: int) -> float | None:
        """How long such a step may well take; None when no step has been seen."""
        known = [size for size in self._longest if size <= max(1, num_tokens).bit_length()]
        if not known:
            return min(self._longest.values(), default=None)  # a smaller step takes no longer
        nearest = max(known)
        scaled = self._longest[nearest] * num_tokens / (1 << nearest - 1)
        return max(scaled, *(self._longest[size] for size in known))


class StallWatch:
    """`look` on every turn of the loop; then `stalled` says why there is no progress ("" when there is), and `stuck` why there
    will be none."""

    def __init__(self, times: StepTimes, step_timeout: float, *, most_tokens: int = 0) -> None:
        """Steps that are taken together with other engines may have up to `most_tokens` there: they are not given up before
        such a step would be."""
        self.stalled = ""
        self.stuck = ""
        self._times = times
        self._most_tokens = most_tokens
        self._step_timeout = step_timeout
        self._looked = self._back = 0.0  # the last look, and the first one after we had been away
        self._rested = 0.0  # when there was no reason to complain about anything but a step

    def look(self, now: float, step: tuple[int, float, int] | None, *, has_work: bool, halted: str) -> None:
        """`step`: the oldest one in flight (number, when it began, tokens). `halted`: which worker the system has stopped."""
        is_back, self._looked = now - self._looked > AWAY_S, now
        if is_back:
            self._back = now
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
            self._look_at(number, now - max(began, self._back), num_tokens)

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

"""The prompt tokens of a step: as many as fit beside its decoding sequences, in tokens and in time.

Used by the scheduler; pure. While a prompt is computed, the streams of all other sequences wait for the step to end. The bound on
its seconds is the tightest target of the sequences that decode in it, but:

- the step may always last `decode_steps` times what its decoding part alone takes, or prompts would hardly get on where that comes
  close to the target;
- a prompt that has waited longer for its first token than the target for that widens the bound in proportion;
- LEAST_TOKENS always fit.

On a GPU, a chunk that is cut short fills whole tiles of the GEMMs, or a captured size.
"""

from __future__ import annotations

from math import inf

from trireme.machine.step_sizes import LEAST_KEPT, StepSizes
from trireme.step_time import StepShape, StepTimeModel

LEAST_TOKENS = 16


class ChunkBudget:
    """Of one scheduler: `open` starts a step, `take` spends. `bound_s` is the bound of the step, infinite for none."""

    __slots__ = (
        "_decode_steps",
        "_most_tokens",
        "_shape",
        "_sizes",
        "agreed_late",
        "bound_s",
        "late",
        "peers_target_s",
        "target_s",
        "times",
    )

    def __init__(
        self, times: StepTimeModel, most_tokens: int, decode_steps: float, sizes: StepSizes | None = None
    ) -> None:
        """`most_tokens`: of any step, decoding sequences included. `decode_steps`: see above, at least 1. `sizes`: on a GPU."""
        self._sizes = sizes
        self._decode_steps = decode_steps
        self.times = times
        self._most_tokens = most_tokens
        self._shape = StepShape()
        self.target_s = self.bound_s = inf
        self.late = 1.0
        self.peers_target_s = inf  # the tightest target of sequences on lockstep peers
        self.agreed_late = 0.0  # `late` of all lockstep ranks, by their latest agreement; 0: outside of lockstep

    def open(self, shape: StepShape, target_s: float, late: float = 1.0) -> None:
        """Starts a step that so far has the decoding sequences of `shape`. `target_s`: their tightest target, infinite for none.
        `late`: by which factor the longest wait for a first token exceeds its target, at least 1."""
        self._shape, self.target_s = shape, target_s
        decode_s = self.times.decode_seconds(shape) if shape.rows else 0.0
        self.bound_s = late * max(target_s, self._decode_steps * decode_s)
        self.late = late

    @property
    def is_late(self) -> bool:
        """Prompts wait longer than their target although the step may exceed its own."""
        return self.late > 1.0 and self.target_s < inf

    @property
    def tokens_left(self) -> int:
        """Tokens that the step may still have, whatever their time."""
        return self._most_tokens - self._shape.rows - self._shape.prompt

    def room(self, num_tokens: int, start: int) -> int:
        """How many of `num_tokens` prompt tokens, the first at position `start`, the step has room for. Scraps are left to a
        later step."""
        most = min(num_tokens, self.tokens_left)
        if self.bound_s == inf or most <= 0:
            return max(0, most)
        least = min(most, LEAST_TOKENS)
        times = self.times
        room = times.room(self._shape, start, (1.0 - times.margin) * self.bound_s, most)
        if room < least:
            return 0 if self._shape.prompt else least
        return room if room == most or self._sizes is None else self._filling(room, most, start, self._sizes)

    def _filling(self, room: int, most: int, start: int, sizes: StepSizes) -> int:
        """A number of tokens near `room`, up to `most`, with which the step computes little padding: the next larger one if the
        step stays within its bound, or else the next smaller one."""
        before, bound_s = self._shape.prompt, (1.0 - self.times.margin) * self.bound_s
        fewer, more = (tokens - before for tokens in sizes.filling(self._shape.rows, before + room))
        if more <= most and self.times.cautious_seconds(self._shape.plus(more, start)) <= bound_s:
            return more
        return fewer if fewer >= LEAST_KEPT * room else room

    def take(self, num_tokens: int, start: int) -> None:
        """Spends the time and tokens of a chunk."""
        self._shape = self._shape.plus(num_tokens, start)

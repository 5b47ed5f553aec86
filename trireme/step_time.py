"""How long a step takes: its shape, a cost by formula (StepCosts), and an estimate learned from measured steps (StepTimeModel).

Used by the engine core to choose how many prompt tokens a step may have, by the simulator, and by `trireme plan`. Pure: no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import exp, log, sqrt
from typing import NamedTuple

from trireme.machine.step_sizes import TOTALS, StepSizes


class StepShape(NamedTuple):
    """What one step computes. `pairs`: attention scores of its prompt chunks, the sum over their tokens of the tokens before."""

    rows: int = 0  # sequences that decode one token each
    context: int = 0  # tokens that these read
    prompt: int = 0  # prompt tokens, of all chunks
    pairs: float = 0.0

    def plus(self, num_tokens: int, start: int) -> StepShape:
        """With a chunk of `num_tokens` prompt tokens more, whose first is at position `start`."""
        return StepShape(
            self.rows, self.context, self.prompt + num_tokens, self.pairs + num_tokens * (start + num_tokens / 2)
        )


class StepCosts(NamedTuple):
    """Seconds of a step by formula: the sum of what each part of its shape costs."""

    step_s: float = 0.01  # every step: weights read, kernels launched
    token_s: float = 0.0002  # of each token
    context_s: float = 0.000002  # of each token of context that a decoding sequence reads
    pair_s: float = 0.0  # of each score of a prompt chunk

    def seconds(self, shape: StepShape) -> float:
        """Of one step."""
        tokens = shape.rows + shape.prompt
        return self.step_s + self.token_s * tokens + self.context_s * shape.context + self.pair_s * shape.pairs


LEAST_S = 1e-6  # of any step: predictions are divided by
NOISE = 0.1  # of a measured time, relative
DRIFT = 0.003  # relative change of a cost from one measurement to the next
MOST_UNSURE = 1.0  # relative, that is added to a prediction
UNSURE = 2.0  # of a cost about which one measurement says something, relative
FIRST_BASE = {True: 0.4, False: 0.9}  # share of the first step of a kind that any such step would have taken
FAR_CONTEXT = 4096.0  # tokens of context that may cost as much as a token itself, before anything is known
OUTLIER = 3.0  # deviations beyond which a measurement counts less
FAR = 8.0  # times, or a part, of what was expected: so wrong a kind of step is learned anew
FAR_STEPS = 3  # when so many in a row were: the first one may have compiled something
SETTLED = 0.2  # relative uncertainty of a prediction up to which it counts for the level
LATEST = 9  # steps whose median ratio is the level
BEND = 0.1  # weight of the newest measurement in the corrections by size
MOST_TURN = 0.5  # of such a correction that one measurement may ask for
MOST_BEND = 2.5  # the largest correction, and its inverse the smallest
KNOTS = tuple(1 << power for power in range(25))  # sizes that have a correction each
ERRORS = 256  # the latest are remembered
NEWEST = 0.05  # weight of the newest error in the margin
USUAL_ERROR = 0.1
FAR_ERROR = (
    4.0  # times the mean: a larger error, above USUAL_ERROR, counts as that; no margin helps when the host stands still
)
SURE = 2.9  # times the mean error: one step in a hundred is off by more, if errors are normally distributed
MOST_MARGIN = 0.2

Costs = list[float]


class _Costs:
    """The costs of one kind of step, learned by recursive least squares on relative errors (a Kalman filter with the costs as its
    state): seconds = costs[0] + costs[1] * tokens + costs[2] * context + costs[3] * pairs. And a factor by size, at `knots`
    tokens: the sizes that a GPU has captured, and the bend where computing begins to take longer than reading weights."""

    def __init__(self, features: Costs, seconds: float, base: float, knots: Sequence[int] = KNOTS) -> None:
        """From the first measurement; `base`: the share of it that does not depend on the size."""
        self._knots = knots
        tokens = features[1]
        unsure = [1.0, 1.0 / tokens, 1.0 / (tokens * FAR_CONTEXT), 1.0 / (tokens * FAR_CONTEXT)]
        self.values = [max(LEAST_S, base * seconds), (1.0 - base) * seconds / tokens, 0.0, 0.0]
        spread = [(UNSURE * seconds * share / 2) ** 2 for share in unsure]
        self._most = spread  # nothing is less certain than it was at first
        self._forget()
        self._bends = [1.0] * len(knots)
        self.largest = tokens
        self.num_far = 0  # steps in a row that took far more or less than expected

    def _forget(self) -> None:
        """Makes all costs as uncertain as at first, and independent."""
        self._covariance = [[self._most[i] if i == j else 0.0 for j in range(4)] for i in range(4)]

    def seconds(self, features: Costs) -> float:
        """By the costs alone."""
        values = self.values
        return values[0] + values[1] * features[1] + values[2] * features[2] + values[3] * features[3]

    def bend(self, tokens: float) -> float:
        """The factor of a size."""
        place, share = self._place(tokens)
        return self._bends[place] + share * (self._bends[place + 1] - self._bends[place])

    def pulls(self, features: Costs) -> Costs:
        """The covariance times the features."""
        _, tokens, context, pairs = features
        return [row[0] + row[1] * tokens + row[2] * context + row[3] * pairs for row in self._covariance]

    def uncertainty(self, features: Costs, seconds: float, pulls: Costs | None = None) -> float:
        """Relative standard deviation of a prediction of `seconds`."""
        return sqrt(max(0.0, _dot(features, pulls or self.pulls(features)))) / seconds

    def observe(self, features: Costs, seconds: float, pulls: Costs) -> None:
        """A step took `seconds`, at level 1. `pulls`: of its features."""
        bend, expected = self.bend(features[1]), self.seconds(features)
        self._learn_bend(features[1], seconds / expected)
        self.largest = max(self.largest, features[1])
        wanted = seconds / bend
        variance = _dot(features, pulls)
        if variance < 0.0:  # rounding has made the covariance none
            self._forget()
            return
        variance += (NOISE * wanted) ** 2
        wrong = wanted - expected
        if wrong * wrong > OUTLIER * OUTLIER * variance:
            wrong *= OUTLIER * sqrt(variance) / abs(wrong)
        first, second, third, fourth = pulls
        values, most = self.values, self._most
        for i, row in enumerate(self._covariance):
            gain = pulls[i] / variance
            values[i] = value = max(0.0 if i else LEAST_S, values[i] + gain * wrong)
            row[0] -= gain * first
            row[1] -= gain * second
            row[2] -= gain * third
            row[3] -= gain * fourth
            row[i] = min(most[i], max(row[i], 0.0) + (DRIFT * value) ** 2)

    def _learn_bend(self, tokens: float, ratio: float) -> None:
        place, share = self._place(tokens)
        wrong = max(-MOST_TURN, min(MOST_TURN, ratio - self.bend(tokens)))
        for at, weight in ((place, 1.0 - share), (place + 1, share)):
            self._bends[at] = max(1 / MOST_BEND, min(MOST_BEND, self._bends[at] + BEND * weight * wrong))

    def _place(self, tokens: float) -> tuple[int, float]:
        """The knot below `tokens`, and how far it is to the next (0..1)."""
        knots = self._knots
        place = max(0, min(bisect_right(knots, tokens), len(knots) - 1) - 1)
        return place, max(0.0, min(1.0, (tokens - knots[place]) / (knots[place + 1] - knots[place])))


def _dot(a: Costs, b: Costs) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


class StepTimeModel:
    """Learns step times from pairs of shape and seconds.

        seconds = level * factor of its size * costs of its kind

    Steps with prompt tokens and steps without are two kinds: a GPU replays a captured graph for the latter. `level` follows within
    a few steps when all steps become slower or faster (another process has a core): the median ratio of the latest that were
    predicted from settled costs.
    """

    def __init__(self, sizes: StepSizes | None = None) -> None:
        """`sizes`: what steps with prompt tokens are padded to."""
        self.level = 1.0
        self._sizes = sizes
        self._knots = KNOTS if sizes is None else tuple(sorted({*KNOTS, *TOTALS}))
        self._kinds: dict[bool, _Costs] = {}
        self._ratios: deque[float] = deque([0.0] * LATEST, maxlen=LATEST)
        self._errors: deque[float] = deque(maxlen=ERRORS)
        self._error = MOST_MARGIN / SURE  # mean of the latest

    def seconds(self, shape: StepShape) -> float:
        """Expected seconds of a step; 0 while nothing is known."""
        costs = self._kinds.get(shape.prompt > 0) or self._kinds.get(shape.prompt == 0)
        if costs is None:
            return 0.0
        features = self._features(shape)
        return self.level * costs.bend(features[1]) * costs.seconds(features)

    def cautious_seconds(self, shape: StepShape) -> float:
        """The same, plus its standard deviation: what a deep context costs may not be known yet."""
        costs = self._kinds.get(shape.prompt > 0)
        if costs is None:
            return self.seconds(shape)
        features = self._features(shape)
        seconds = costs.seconds(features)
        unsure = min(MOST_UNSURE, costs.uncertainty(features, seconds))
        return self.level * costs.bend(features[1]) * seconds * (1.0 + unsure)

    @property
    def margin(self) -> float:
        """Share of a bound to keep free, so that all but about one step in a hundred stay within it."""
        return min(MOST_MARGIN, SURE * self._error)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`."""
        if seconds <= 0.0 or shape.rows + shape.prompt == 0:
            return
        features = self._features(shape)
        kind = shape.prompt > 0
        costs = self._kinds.get(kind)
        plain = costs.bend(features[1]) * costs.seconds(features) if costs is not None else 0.0
        if costs is not None:
            is_far = not 1.0 / FAR < seconds / (self.level * plain) < FAR
            costs.num_far = costs.num_far + 1 if is_far else 0
        if costs is None or costs.num_far == FAR_STEPS:
            self._kinds[kind] = _Costs(features, seconds / self.level, FIRST_BASE[kind], self._knots)
            return
        error = abs(seconds - self.level * plain) / seconds
        self._errors.append(error)
        self._error += NEWEST * (min(error, max(USUAL_ERROR, FAR_ERROR * self._error)) - self._error)
        pulls = costs.pulls(features)
        if costs.uncertainty(features, plain, pulls) < SETTLED:
            self._ratios.append(log(seconds / plain))
            self.level = exp(sorted(self._ratios)[LATEST // 2])
        costs.observe(features, seconds / self.level, pulls)

    def errors(self) -> tuple[float, float]:
        """Median and 95th percentile of the relative error of the latest predictions, each made before its step."""
        if not self._errors:
            return 0.0, 0.0
        found = sorted(self._errors)
        return found[len(found) // 2], found[min(len(found) - 1, len(found) * 95 // 100)]

    def room(self, shape: StepShape, start: int, bound_s: float, most: int) -> int:
        """The most tokens, up to `most`, of a prompt chunk from position `start` with which a step of `shape` stays within
        `bound_s` seconds; at most twice the largest step measured, and 0 while none with a prompt has been."""
        costs = self._kinds.get(True)
        if costs is None:
            return 0
        most = min(most, int(2 * costs.largest) - shape.rows - shape.prompt)
        if most <= 0 or self.cautious_seconds(shape.plus(most, start)) <= bound_s:
            return max(0, most)
        low, high = 0, most  # `low` fits (or is nothing), `high` does not
        while high - low > max(1, low // 32):
            middle = (low + high) // 2
            if self.cautious_seconds(shape.plus(middle, start)) <= bound_s:
                low = middle
            else:
                high = middle
        return low

    def decode_seconds(self, shape: StepShape) -> float:
        """Expected seconds of a step of the decoding sequences of `shape` alone, by the lower of both kinds: few such steps may
        have been measured, and a step with prompt tokens takes no less. Less its uncertainty; 0 while nothing is settled."""
        features = self._features(StepShape(shape.rows, shape.context))
        found = []
        for costs in self._kinds.values():
            seconds = costs.seconds(features)
            if (unsure := costs.uncertainty(features, seconds)) < SETTLED:
                found.append((1.0 - unsure) * costs.bend(features[1]) * seconds)
        return self.level * min(found, default=0.0)

    def _features(self, shape: StepShape) -> Costs:
        tokens = shape.rows + shape.prompt
        if shape.prompt and self._sizes is not None:
            tokens = self._sizes.computed(shape.rows, shape.prompt)
        return [1.0, float(tokens), float(shape.context), float(shape.pairs)]

"""Log-probabilities of tokens: the log-softmax of the model's own logits, before penalties, bias, bars and temperature.

Called by workers.sampler (sampled tokens) and workers.runner (prompt tokens). One position at a time, so that a value
depends on nothing else in the step. Rank 1 is the likeliest token; equal logits share the better rank.
"""

from __future__ import annotations

import numpy as np

from transport.messages import LogprobRow
from workers.noise import Floats
from workers.rules import Tokens
from workers.truncation import top_ids


def logprob_row(row: int, logits: Floats, targets: Tokens, k: int) -> LogprobRow:
    """Log-probabilities of targets[i] under logits[i] ([n, vocab]), and of the k likeliest tokens of each position.

    Raises ValueError when a position's logits hold NaN or +inf, or nothing finite.
    """
    k = min(k, logits.shape[1])
    token_ids = np.full((targets.size, 1 + k), -1, np.int32)
    values = np.full((targets.size, 1 + k), -np.inf, np.float32)
    ranks = np.empty(targets.size, np.int32)
    for i, target in enumerate(targets.tolist()):
        position = logits[i]
        own = position[target]
        peak = position.max()
        if not np.isfinite(peak):
            raise ValueError(f"logits before prompt token or output {target} are not finite (greatest is {peak})")
        total = np.log(np.exp(position - peak).sum())
        token_ids[i, 0], values[i, 0] = target, (own - peak) - total
        ranks[i] = 1 + np.count_nonzero(position > own)
        if k:
            best = top_ids(position, k)
            token_ids[i, 1 : 1 + best.size] = best
            values[i, 1 : 1 + best.size] = (position[best] - peak) - total
    return LogprobRow(row, token_ids, values, ranks)

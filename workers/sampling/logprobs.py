"""Log-probabilities of tokens: the log-softmax of the model's own logits, before penalties, bias, masks and temperature.

Called by workers.sampling.sampler (sampled tokens) and workers.cpu.runner (prompt tokens). One position at a time, so that a value
depends on nothing else in the step. Rank 1 is the likeliest token; equal logits share the better rank. The compiled kernel
(csrc/cpu/sampling/sampling.h) is used where it is built; numpy's result may differ from it in a value's last digits only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trireme.models.native import find_native
from trireme.transport.wire.messages import LogprobRow
from trireme.workers.logits_processors import Tokens
from trireme.workers.sampling.gumbel import Floats
from trireme.workers.sampling.top_k_top_p import top_ids

_NOT_FINITE = -2  # a rank returned by the kernel


def logprob_row(row: int, logits: Floats, targets: Tokens, k: int) -> LogprobRow:
    """Log-probabilities of targets[i] under logits[i] ([n, vocab]), and of the k likeliest tokens of each position.

    Raises ValueError when a position's logits hold NaN or +inf, or nothing finite.
    """
    native = find_native()
    if native is None or logits.strides[1] != logits.itemsize or k > native.SAMPLE_MAX_BEST:
        return logprob_row_reference(row, logits, targets, k)
    return _native_logprob_row(native, row, logits, targets, min(k, logits.shape[1]))


def _native_logprob_row(native: Any, row: int, logits: Floats, targets: Tokens, k: int) -> LogprobRow:
    targets = np.ascontiguousarray(targets, np.int32)
    token_ids = np.empty((targets.size, 1 + k), np.int32)
    values = np.empty((targets.size, 1 + k), np.float32)
    ranks = np.empty(targets.size, np.int32)
    native.logprob_rows(logits, targets, token_ids, values, ranks)
    wrong = np.flatnonzero(ranks == _NOT_FINITE)
    if wrong.size:
        raise _not_finite(int(targets[wrong[0]]), float(logits[wrong[0]].max()))
    return LogprobRow(row, token_ids, values, ranks)


def logprob_row_reference(row: int, logits: Floats, targets: Tokens, k: int) -> LogprobRow:
    """`logprob_row` in numpy, the reference of the compiled kernel. Raises ValueError as it does."""
    k = min(k, logits.shape[1])
    token_ids = np.full((targets.size, 1 + k), -1, np.int32)
    values = np.full((targets.size, 1 + k), -np.inf, np.float32)
    ranks = np.empty(targets.size, np.int32)
    for i, target in enumerate(targets.tolist()):
        position = logits[i]
        own = position[target]
        peak = position.max()
        if not np.isfinite(peak):
            raise _not_finite(target, float(peak))
        total = np.log(np.exp(position - peak).sum())
        token_ids[i, 0], values[i, 0] = target, (own - peak) - total
        ranks[i] = 1 + np.count_nonzero(position > own)
        if k:
            best = top_ids(position, k)
            token_ids[i, 1 : 1 + best.size] = best
            values[i, 1 : 1 + best.size] = (position[best] - peak) - total
    return LogprobRow(row, token_ids, values, ranks)


def _not_finite(target: int, peak: float) -> ValueError:
    return ValueError(f"logits before prompt token or output {target} are not finite (greatest is {peak})")

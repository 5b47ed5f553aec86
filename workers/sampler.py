"""Turns logits into tokens, row by row as each row's parameters ask. Called by workers.runner on the reporting worker.

A greedy row without rules costs its share of one argmax; every other row is worked alone on a scratch copy, so its token
cannot depend on its batch-mates and an error in it ends in a RowFault for it alone. Order per row: penalties, bias, bars
(workers.rules), temperature, top-k, top-p, min-p (workers.truncation), noise (workers.noise). Greedy takes the lowest id
among equals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from transport.messages import LogprobRow, RowFault
from trireme.params import RowParams
from workers.batch import ROW_ERRORS, Batch
from workers.logprobs import logprob_row
from workers.noise import Floats, NoiseField, noise_key, race_among
from workers.truncation import survivors


@dataclass(slots=True)
class Sampled:
    """rows[i] drew tokens[i]; a faulted row is in neither."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)

    def extend(self, other: Sampled) -> None:
        """Appends another forward's rows."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.faults += other.faults


class Sampler:
    """Scratch memory for one vocabulary. Not for several threads."""

    def __init__(self, vocab_size: int) -> None:
        self._noise = NoiseField(vocab_size)
        self._scratch = np.empty(vocab_size, np.float32)

    def sample(self, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Sampled:
        """Draws the next token of batch row rows[i] from logits[i]; `logits` [n, vocab] is not changed."""
        if not rows.size:
            return Sampled()
        best = logits.argmax(axis=1)  # the first NaN where there is one
        peaks = logits[np.arange(rows.size), best]
        is_sound = np.isfinite(peaks)
        if batch.is_plain[rows].all() and is_sound.all():
            return Sampled(rows.tolist(), best.tolist())
        result = Sampled()
        for i, row in enumerate(rows.tolist()):
            try:
                if not is_sound[i]:
                    raise ValueError(f"the model gave logits that are not finite (greatest is {peaks[i]})")
                token = int(best[i]) if batch.is_plain[row] else self._draw(row, batch, logits[i], int(best[i]))
                params = batch.row_params(row)
                if params.logprobs >= 0:
                    result.logprobs.append(
                        logprob_row(row, logits[i : i + 1], np.array([token], np.int32), params.logprobs)
                    )
            except ROW_ERRORS as error:
                result.faults.append(RowFault(row, f"sampling failed: {error}"))
                continue
            result.rows.append(row)
            result.tokens.append(token)
        return result

    def _draw(self, row: int, batch: Batch, logits: Floats, best: int) -> int:
        """The token of one row; `best` is the argmax of its untouched logits."""
        params, rules = batch.row_params(row), batch.rules[row]
        if rules is not None:
            np.copyto(self._scratch, logits)
            logits = self._scratch
            rules.apply(logits, batch.row_tokens(row))
            best = int(logits.argmax())
        peak = float(logits[best])
        if not np.isfinite(peak):
            raise ValueError("no token is left to sample: the parameters bar every one")
        if params.is_greedy:
            return best
        key = noise_key(params.seed, params.choice, int(batch.num_tokens[row]))
        if _takes_all(params, logits.size):
            return self._noise.race(logits, peak, params.temperature, key)
        ids = survivors(logits, peak, (params.top_k, params.top_p, params.min_p, params.temperature))
        return race_among(ids, logits[ids], peak, params.temperature, key)


def _takes_all(params: RowParams, vocab_size: int) -> bool:
    return not 0 < params.top_k < vocab_size and params.top_p >= 1.0 and params.min_p <= 0.0

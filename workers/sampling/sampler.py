"""Samples tokens from logits, each sequence by its own parameters. Called by workers.cpu.runner on the reporting worker.

The compiled sampler (workers.sampling.native_sampler) handles a whole batch in one call; the numpy path here defines its results,
handles a sequence that it leaves undecided, and is used where it is not built. Every sequence is sampled alone, so its token cannot
depend on the rest of the batch, and an error ends in a RowFault for it alone. Order per sequence: penalties, bias, masks
(workers.logits_processors), temperature, top-k, top-p, min-p (workers.sampling.top_k_top_p), noise
(workers.sampling.gumbel). Greedy takes the lowest id among equals.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trireme.models.native import find_native
from trireme.params import RowParams
from trireme.transport.wire.messages import LogprobRow, RowFault
from trireme.workers.batch import ROW_ERRORS, Batch
from trireme.workers.sampling.gumbel import Floats, NoiseField, argmax_among, noise_key
from trireme.workers.sampling.logprobs import logprob_row, logprob_row_reference
from trireme.workers.sampling.native_sampler import NOT_FINITE, NOTHING_LEFT, Answers, NativeSampler
from trireme.workers.sampling.top_k_top_p import kept

ALL_MASKED = "no token is left to sample: allowed_token_ids, bad_words and min_tokens together mask every one"


class NothingLeftError(ValueError):
    """The logits processors mask every token."""


@dataclass(slots=True)
class Sampled:
    """Slot rows[i] sampled tokens[i]; a faulted one is in neither."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)

    def extend(self, other: Sampled) -> None:
        """Appends the samples of another forward."""
        self.rows += other.rows
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.faults += other.faults


class Sampler:
    """Scratch memory for one vocabulary. Not thread-safe. `native` off: numpy only."""

    def __init__(self, vocab_size: int, *, native: bool = True) -> None:
        extension = find_native() if native else None
        self._native = NativeSampler(extension, vocab_size) if extension is not None else None
        self.vocab_size = vocab_size
        self._noise = NoiseField(vocab_size)
        self._scratch = np.empty(vocab_size, np.float32)

    def sample(self, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Sampled:
        """Samples the next token of batch slot rows[i] from logits[i]; `logits` [n, vocab] is not changed. An error of the whole
        batch is attributed to one sequence: the batch is bisected down to it."""
        if not rows.size:
            return Sampled()
        try:
            return self._sample(logits, rows, batch)
        except ROW_ERRORS as error:
            if rows.size == 1:
                return Sampled(faults=[_fault(int(rows[0]), error)])
        half = rows.size // 2
        result = self.sample(logits[:half], rows[:half], batch)
        result.extend(self.sample(logits[half:], rows[half:], batch))
        return result

    def _sample(self, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Sampled:
        if self._native is not None and logits.strides[1] == logits.itemsize:
            return self._read(self._native.run(logits, rows, batch), logits, rows, batch)
        return self._sample_reference(logits, rows, batch)

    def _read(self, answers: Answers, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Sampled:
        """The compiled sampler's answers as a result; undecided sequences take the numpy path."""
        if not answers.wants_any and (answers.tokens >= 0).all():
            return Sampled(rows.tolist(), answers.tokens.tolist())
        result = Sampled()
        for i, (row, token) in enumerate(zip(rows.tolist(), answers.tokens.tolist(), strict=True)):
            if token == NOT_FINITE:
                result.faults.append(_fault(row, _not_finite(answers.peaks[i])))
            elif token == NOTHING_LEFT:
                result.faults.append(_fault(row, NothingLeftError()))
            elif token < 0:
                result.extend(self._sample_reference(logits[i : i + 1], rows[i : i + 1], batch))
            else:
                result.rows.append(row)
                result.tokens.append(token)
                if answers.wanted[i] >= 0:
                    result.logprobs.append(answers.logprob_row(row, i))
        return result

    def _sample_reference(self, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Sampled:
        best = logits.argmax(axis=1)  # the first NaN if there is one
        peaks = logits[np.arange(rows.size), best]
        result = Sampled()
        for i, row in enumerate(rows.tolist()):
            try:
                if not np.isfinite(peaks[i]):
                    raise _not_finite(peaks[i])
                token = int(best[i]) if batch.is_plain[row] else self._draw(row, batch, logits[i], int(best[i]))
                params = batch.row_params(row)
                if params.logprobs >= 0:
                    result.logprobs.append(self._logprobs(row, logits[i : i + 1], token, params.logprobs))
            except ROW_ERRORS as error:
                result.faults.append(_fault(row, error))
                continue
            result.rows.append(row)
            result.tokens.append(token)
        return result

    def _logprobs(self, row: int, logits: Floats, token: int, k: int) -> LogprobRow:
        compute = logprob_row_reference if self._native is None else logprob_row
        return compute(row, logits, np.array([token], np.int32), k)

    def _draw(self, row: int, batch: Batch, logits: Floats, best: int) -> int:
        """The token of one slot; `best` is the argmax of its unprocessed logits."""
        params, rules = batch.row_params(row), batch.rules[row]
        if rules is not None:
            np.copyto(self._scratch, logits)
            logits = self._scratch
            rules.apply(logits, batch.row_tokens(row))
            best = int(logits.argmax())
        peak = float(logits[best])
        if not np.isfinite(peak):
            raise NothingLeftError
        if params.is_greedy:
            return best
        key = noise_key(params.seed, params.choice, int(batch.num_tokens[row]))
        if _takes_all(params, logits.size):
            return self._noise.argmax(logits, peak, params.temperature, key)
        ids = kept(logits, peak, (params.top_k, params.top_p, params.min_p, params.temperature))
        return argmax_among(ids, logits[ids], peak, params.temperature, key)


def _fault(row: int, error: Exception) -> RowFault:
    if isinstance(error, NothingLeftError):
        return RowFault(row, ALL_MASKED, by_request=True)
    return RowFault(row, f"sampling failed: {error}")


def _not_finite(peak: np.float32) -> ValueError:
    return ValueError(f"the model gave logits that are not finite (greatest is {peak})")


def _takes_all(params: RowParams, vocab_size: int) -> bool:
    return not 0 < params.top_k < vocab_size and params.top_p >= 1.0 and params.min_p <= 0.0

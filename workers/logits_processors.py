"""Logits processors of a sequence: penalties, then bias, then masks (allowed ids, bad words, min_tokens). Built when a sequence is
placed in the batch, only if it needs any; applied by workers.sampling.sampler to a copy.

Semantics: a bias is applied last, so penalties never scale it; a masked token is -inf whatever its bias.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trireme.params import RowParams

Tokens = NDArray[np.int32]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class SeenTokens:
    """Distinct tokens of one sequence and how often each was output. Grows by one token a step, never by the vocabulary."""

    def __init__(self, tokens: Tokens, num_prompt: int, *, with_prompt: bool) -> None:
        outputs = tokens[num_prompt:]
        ids = np.unique(tokens if with_prompt else outputs).astype(np.int64)
        self._size = ids.size
        self._slot = {token: i for i, token in enumerate(ids.tolist())}
        self._ids = np.concatenate([ids, np.zeros(16, np.int64)])
        self._counts = np.zeros(ids.size + 16, np.int32)
        np.add.at(self._counts, np.searchsorted(ids, outputs), 1)
        self._where: tuple[int, int] | None = None

    def add(self, token: int) -> None:
        """Counts one more output."""
        slot = self._slot.setdefault(token, self._size)
        if slot == self._size:
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._where = None
            self._ids[slot] = token
            self._size += 1
        self._counts[slot] += 1

    def addresses(self) -> tuple[int, int, int]:
        """Addresses of ids (int64) and counts (int32), and their length; valid until the next `add`."""
        if self._where is None:
            self._where = self._ids.ctypes.data, self._counts.ctypes.data
        return *self._where, self._size

    def columns(self) -> tuple[Ids, Tokens]:
        """Distinct ids and the number of times each was output (0: prompt only)."""
        return self._ids[: self._size], self._counts[: self._size]


class RuleParts(NamedTuple):
    """The logits processors of a sequence as token ids."""

    seen: Ids
    counts: Tokens  # how often each was output
    bias_ids: Ids
    bias: Floats
    allowed: Ids
    masked: Ids
    ends: Ids  # masked while the output is short
    words: list[tuple[int, ...]]  # never to be completed


class LogitRules:
    """The logits processors of one sequence. Raises ValueError when a named id is outside the vocabulary."""

    def __init__(self, params: RowParams, vocab_size: int, tokens: Tokens, num_prompt: int) -> None:
        self._params = params
        self._seen: SeenTokens | None = None
        if params.has_penalties:
            self._seen = SeenTokens(tokens, num_prompt, with_prompt=params.repetition_penalty != 1.0)
        self._bias_ids = _checked(tuple(token for token, _ in params.logit_bias), vocab_size, "logit_bias")
        self._bias = np.array([value for _, value in params.logit_bias], np.float32)
        self._allowed = _checked(params.allowed_token_ids, vocab_size, "allowed_token_ids")
        self._bad = BadWords(params.bad_token_ids, vocab_size)
        ends = np.array(sorted({*params.eos_token_ids, *params.stop_token_ids}), np.int64)
        self._ends = ends[(ends >= 0) & (ends < vocab_size)]  # an end the model cannot emit needs no mask
        self.has_allowed = bool(self._allowed.size)
        self.ends_from = num_prompt + params.min_tokens  # the position of the first token that may end the sequence
        fixed = (self._bias_ids, self._bias, self._allowed)
        self._fixed = [array.ctypes.data if array.size else 0 for array in fixed]

    @staticmethod
    def needed(params: RowParams) -> bool:
        """True when a sequence with `params` has any logits processor, now or later."""
        return bool(
            params.has_penalties
            or params.logit_bias
            or params.allowed_token_ids
            or params.bad_token_ids
            or params.min_tokens > 0
        )

    def add_output(self, token: int) -> None:
        """Counts a token that the sequence has gained."""
        if self._seen is not None:
            self._seen.add(token)

    def parts(self) -> RuleParts:
        """The sequence's logits processors for a device."""
        none = np.zeros(0, np.int64)
        seen = (none, np.zeros(0, np.int32)) if self._seen is None else self._seen.columns()
        ends = self._ends if self._params.min_tokens > 0 else none
        return RuleParts(*seen, self._bias_ids, self._bias, self._allowed, self._bad.singles, ends, self._bad.longer)

    def describe(self, tokens: Tokens) -> tuple[tuple[int, ...], tuple[int, ...], Ids]:
        """The fields of workers.sampling.native_sampler.JOB: counts, addresses, and an array to keep alive meanwhile."""
        ids, counts, num_seen = (0, 0, 0) if self._seen is None else self._seen.addresses()
        masked = self._bad.masked(tokens)
        if tokens.size < self.ends_from:
            masked = np.concatenate([masked, self._ends])
        bias_ids, bias, allowed = self._fixed
        where = masked.ctypes.data if masked.size else 0
        sizes = (num_seen, self._bias_ids.size, self._allowed.size, masked.size)
        return sizes, (ids, counts, bias_ids, bias, allowed, where), masked

    def apply(self, logits: Floats, tokens: Tokens) -> None:
        """Changes one sequence's logits in place; `tokens` are all its tokens so far."""
        if self._seen is not None:
            self._penalise(logits, *self._seen.columns())
        if self._bias_ids.size:
            np.add.at(logits, self._bias_ids, self._bias)
        if self._allowed.size:
            kept = logits[self._allowed]
            logits.fill(-np.inf)
            logits[self._allowed] = kept
        logits[self._bad.masked(tokens)] = -np.inf
        if tokens.size < self.ends_from:
            logits[self._ends] = -np.inf

    def _penalise(self, logits: Floats, ids: Ids, counts: Tokens) -> None:
        params = self._params
        values = logits[ids]
        if params.repetition_penalty != 1.0:
            rate = np.float32(params.repetition_penalty)
            values = np.where(values > 0, values / rate, values * rate)
        values -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[ids] = values


class BadWords:
    """Token n-grams that must not be completed; the n-gram may begin in the prompt."""

    def __init__(self, sequences: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
        _checked(tuple(token for sequence in sequences for token in sequence), vocab_size, "bad_words")
        self.singles = np.array([s[0] for s in sequences if len(s) == 1], np.int64)
        self.longer = [s for s in sequences if len(s) > 1]
        self._heads = [np.array(s[:-1], np.int32) for s in self.longer]
        self._before_last = np.array([s[-2] for s in self.longer], np.int32)

    def masked(self, tokens: Tokens) -> Ids:
        """Tokens that would complete one of the sequences after `tokens`."""
        if not self.longer or not tokens.size:
            return self.singles
        completing = [
            self.longer[i][-1]
            for i in np.flatnonzero(self._before_last == tokens[-1]).tolist()
            if tokens.size >= self._heads[i].size and np.array_equal(tokens[-self._heads[i].size :], self._heads[i])
        ]
        return np.concatenate([self.singles, np.array(completing, np.int64)])


def _checked(ids: tuple[int, ...], vocab_size: int, name: str) -> Ids:
    array = np.array(ids, np.int64)
    if array.size and not (int(array.min()) >= 0 and int(array.max()) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise ValueError(f"{name} names token {wrong}; this model's vocabulary is 0..{vocab_size - 1}")
    return array

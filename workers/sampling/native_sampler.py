"""The compiled sampler (csrc/cpu/sampling/sampling.h): one call per step for a whole batch. Called by workers.sampling.sampler.

Keeps a job per batch slot, written once when a sequence arrives; a step fills in positions and addresses of logits processors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.params import RowParams
from trireme.transport.wire.messages import LogprobRow
from trireme.workers.batch import Batch
from trireme.workers.sampling.gumbel import Floats

JOB = np.dtype(
    [
        ("seed", np.uint64),
        ("choice", np.int32),
        ("position", np.int32),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_depth", np.float64),
        ("top_k", np.int32),
        ("logprobs", np.int32),
        ("is_greedy", np.int32),
        ("penalties", np.float32, 3),
        ("counts", np.int32, 4),  # of seen tokens, biases, allowed and masked ids
        ("addresses", np.uint64, 6),  # seen, their counts, bias ids, biases, allowed, masked
    ]
)
UNDECIDED, NOT_FINITE, NOTHING_LEFT = -1, -2, -3  # instead of a token


class NativeSampler:
    """Scratch memory and jobs for one vocabulary. Not thread-safe."""

    def __init__(self, native: Any, vocab_size: int) -> None:
        if JOB.itemsize != native.SAMPLE_JOB_BYTES:
            raise AssertionError(f"jobs of {JOB.itemsize} bytes here, {native.SAMPLE_JOB_BYTES} in the extension")
        self._native = native
        self._vocab_size = vocab_size
        self._jobs = np.zeros(0, JOB)
        self._owners: list[RowParams | None] = []  # whose job it is

    def run(self, logits: Floats, rows: NDArray[np.int64], batch: Batch) -> Answers:
        """Tokens, or reasons below 0, and log-probabilities for batch slots `rows`, whose logits are [n, vocab]."""
        slots = rows.tolist()
        if len(self._owners) < len(batch.params):
            self._jobs = np.zeros(len(batch.params), JOB)
            self._owners = [None] * len(batch.params)
        for slot in slots:
            if self._owners[slot] is not batch.params[slot]:
                self._write_job(slot, batch.row_params(slot))
        jobs = self._jobs[rows]
        jobs["position"] = batch.num_tokens[rows]
        held = [self._add_rules(jobs, i, slot, batch) for i, slot in enumerate(slots) if batch.rules[slot] is not None]
        answers = Answers(jobs["logprobs"])
        best = answers.best_ids, answers.logprobs, answers.ranks
        self._native.sample_rows(logits, jobs.view(np.uint8), answers.tokens, answers.peaks, *best)
        del held
        return answers

    def _write_job(self, slot: int, params: RowParams) -> None:
        size = self._vocab_size
        job = self._jobs[slot]
        job["seed"] = params.seed & (2**64 - 1)
        job["choice"] = params.choice
        job["temperature"] = params.temperature
        job["top_p"] = params.top_p
        job["min_depth"] = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        job["top_k"] = params.top_k if 0 < params.top_k < size else 0
        job["logprobs"] = min(params.logprobs, size)
        job["is_greedy"] = params.is_greedy
        job["penalties"] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._owners[slot] = params

    def _add_rules(self, jobs: NDArray[Any], i: int, slot: int, batch: Batch) -> object:
        """Writes the addresses of a slot's logits processors; keep the returned object alive until the call is over."""
        rules = batch.rules[slot]
        assert rules is not None
        counts, addresses, held = rules.describe(batch.row_tokens(slot))
        jobs["counts"][i] = counts
        jobs["addresses"][i] = addresses
        return held


class Answers:
    """Results of one call for n slots; `wanted` is each one's number of likeliest tokens, -1 for no log-probabilities."""

    def __init__(self, wanted: NDArray[np.int32]) -> None:
        n, most = wanted.size, int(wanted.max())
        self.wanted = wanted
        self.wants_any = most >= 0
        self.num_best = max(most, 0)
        self.tokens = np.empty(n, np.int32)
        self.peaks = np.empty(n, np.float32)
        self.best_ids = np.empty((n, 1 + self.num_best), np.int32)
        self.logprobs = np.empty((n, 1 + self.num_best), np.float32)
        self.ranks = np.empty(n, np.int32)

    def logprob_row(self, row: int, i: int) -> LogprobRow:
        """The log-probabilities of answer i as those of batch slot `row`."""
        width = 1 + int(self.wanted[i])
        return LogprobRow(
            row, self.best_ids[i : i + 1, :width], self.logprobs[i : i + 1, :width], self.ranks[i : i + 1]
        )

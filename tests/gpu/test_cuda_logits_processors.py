"""Rows with logit rules in the sampling kernel: what numpy draws after workers.logits_processors, and what is
counted; log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.params import RowParams
from trireme.workers.cuda.device_state import job_of
from trireme.workers.cuda.logits_processors import DeviceRules
from trireme.workers.logits_processors import LogitRules
from trireme.workers.sampling.gumbel import argmax_among, noise_key
from trireme.workers.sampling.logprobs import logprob_row_reference
from trireme.workers.sampling.native_sampler import NOTHING_LEFT
from trireme.workers.sampling.top_k_top_p import kept

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CUTS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
]


def rules_of(i: int, vocab: int, rng: np.random.Generator) -> dict[str, Any]:
    """Rules of the i-th kind."""

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, vocab, count).tolist())

    many = min(vocab // 2, 5000)
    ends = tuple((first, last) for first, last in rng.integers(0, vocab, (99, 2)).tolist())
    kinds: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "presence_penalty": -0.4},
        {"frequency_penalty": 1.1},
        {"repetition_penalty": 0.8, "logit_bias": tuple((token, rng.normal() * 5) for token in set(some(300)))},
        {"allowed_token_ids": some(12), "presence_penalty": 0.5},
        {"bad_token_ids": tuple((token,) for token in some(many)) + ends, "min_tokens": 4, "eos_token_ids": some(many)},
        {"bad_token_ids": tuple(some(2 + j % 7) for j in range(40)) + ends, "repetition_penalty": 1.1},
        {"min_tokens": 3, "eos_token_ids": (vocab - 1,), "stop_token_ids": some(3)},
    ]
    return kinds[i % len(kinds)]


class Rows:
    """Rows of random tokens and rules, on the host and on the card."""

    def __init__(self, count: int, vocab: int) -> None:
        rng = np.random.default_rng(vocab)
        self.vocab, self.params = vocab, []
        self.tokens, self.host = [], []
        jobs, told = np.zeros(count, ops.JOB), {}
        self.rules = DeviceRules(count, vocab, torch.device("cuda"), pool_bytes=1 << 40)
        for row in range(count):
            params = RowParams(
                99, seed=row * 7919, choice=row % 3, **CUTS[row % len(CUTS)], **rules_of(row, vocab, rng)
            )
            tokens = rng.integers(0, vocab, 3 + 5 * row).astype(np.int32)
            host = LogitRules(params, vocab, tokens, tokens.size - row % 4)
            self.params.append(params)
            self.tokens.append(tokens)
            self.host.append(host)
            jobs[row] = job_of(params, vocab)
            if LogitRules.needed(params):
                assert self.rules.admit(row)
                told[row] = row, host, tokens
        self.rules.write(jobs, told, lambda at, values: (torch.from_numpy(at).cuda(), torch.from_numpy(values).cuda()))
        self.jobs = torch.from_numpy(jobs.view(np.uint8)).cuda()

    def sample(self, logits: Tensor) -> list[int]:
        """By the kernel."""
        positions = torch.tensor([tokens.size for tokens in self.tokens], dtype=torch.int32, device="cuda")
        found = torch.full_like(positions, -9)
        ops.sample_rows(logits, self.jobs, positions, found)
        return found.tolist()

    def expected(self, logits: Tensor) -> list[int]:
        """By the definitions."""
        return [self._drawn(row, values) for row, values in enumerate(logits.float().cpu().numpy())]

    def _drawn(self, row: int, values: np.ndarray[Any, np.dtype[np.float32]]) -> int:
        params, tokens = self.params[row], self.tokens[row]
        self.host[row].apply(values, tokens)
        best = int(values.argmax())
        peak = float(values[best])
        if peak == -math.inf:
            return NOTHING_LEFT
        if params.is_greedy:
            return best
        ids = np.flatnonzero(values > -np.inf)
        if 0 < params.top_k < self.vocab or params.top_p < 1 or params.min_p > 0:
            ids = kept(values, peak, (params.top_k, params.top_p, params.min_p, params.temperature))
        key = noise_key(params.seed, params.choice, tokens.size)
        return argmax_among(ids, values[ids], peak, params.temperature, key)

    def keep(self, found: list[int]) -> None:
        """The host is told; the card knows."""
        for row, token in enumerate(found):
            assert token >= 0
            self.tokens[row] = np.append(self.tokens[row], np.int32(token))
            self.host[row].add_output(token)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [33, 1000, 49152, 128256, 151936])
def test_rows_with_rules_draw_what_numpy_draws(dtype: torch.dtype, vocab: int) -> None:
    """Six steps: outputs are counted on the card, and minima pass."""
    rows = Rows(43, vocab)
    torch.manual_seed(vocab)
    for _ in range(6):
        logits = (torch.randn(43, vocab, device="cuda") * 3).to(dtype)
        logits[:, 3] = -math.inf
        found = rows.sample(logits)
        assert found == rows.expected(logits)
        rows.keep(found)


def test_few_logits_are_told_apart_by_counts() -> None:
    """The same logits again and again: a penalised row must move on as the host's does."""
    rows = Rows(12, 1000)
    logits = torch.randn(12, 1000, device="cuda").bfloat16()
    for _ in range(30):
        found = rows.sample(logits)
        assert found == rows.expected(logits)
        rows.keep(found)


def test_logits_that_are_not_finite_come_before_rules() -> None:
    rows = Rows(7, 1000)
    logits = torch.randn(7, 1000, device="cuda")
    logits[4, 5], logits[5, 6], logits[6] = math.nan, math.inf, -math.inf
    assert rows.sample(logits)[4:] == [ops.NOT_FINITE] * 3


def test_rules_may_leave_nothing() -> None:
    rows = Rows(3, 40)
    job = rows.jobs.view(3, -1).clone()
    only_allowed = ops.JOB.fields["only_allowed"][1]
    job[1:, only_allowed] = 1  # no token has the mark
    rows.jobs = job.view(-1)
    assert rows.sample(torch.randn(3, 40, device="cuda"))[1:] == [ops.NOTHING_LEFT] * 2


def test_rules_can_be_captured() -> None:
    """A graph reads jobs and records as they are when it is replayed."""
    rows, logits = Rows(7, 1000), torch.randn(7, 1000, device="cuda").bfloat16()
    positions = torch.tensor([tokens.size for tokens in rows.tokens], dtype=torch.int32, device="cuda")
    tokens = torch.zeros_like(positions)
    greedy = np.zeros(7, ops.JOB)
    greedy["is_greedy"] = 1
    jobs = torch.from_numpy(greedy.view(np.uint8)).cuda()
    ops.sample_rows(logits, jobs, positions, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.sample_rows(logits, jobs, positions, tokens)
    jobs.copy_(rows.jobs)
    for step in range(5):
        positions += int(step > 0)
        graph.replay()
        found = tokens.tolist()
        assert found == rows.expected(logits)
        rows.keep(found)


COUNTS = [0, 1, 2, 3, 11, ops.MOST_LOGPROBS]


def scored(logits: Tensor, *, greedy: bool) -> tuple[list[int], np.ndarray[Any, np.dtype[np.int32]]]:
    """Tokens and log-probabilities; row i asks for COUNTS[i % 6] of them."""
    count = logits.shape[0]
    jobs = np.zeros(count, ops.JOB)
    jobs["temperature"], jobs["top_p"], jobs["min_depth"] = 1.0, 1.0, -math.inf
    jobs["seed"], jobs["is_greedy"] = np.arange(count), greedy
    jobs["num_logprobs"] = np.resize(COUNTS, count)
    tokens = torch.zeros(count, dtype=torch.int32, device="cuda")
    words = torch.full((count, ops.LOGPROB_WORDS), -7, dtype=torch.int32, device="cuda")
    ops.sample_rows(
        logits, torch.from_numpy(jobs.view(np.uint8)).cuda(), torch.zeros_like(tokens), tokens, logprobs=words
    )
    return tokens.tolist(), words.cpu().numpy()


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 33, 1000, 49152, 151936])
def test_log_probabilities_are_those_of_the_host(vocab: int, dtype: torch.dtype, greedy: bool) -> None:
    """Half types tie often: equal ones go by rising id. Values may differ in their last digits."""
    torch.manual_seed(vocab)
    logits = (torch.randn(13, vocab, device="cuda") * 4).to(dtype)
    logits[:, 3] = -math.inf
    logits[5, 5:] = -math.inf  # fewer are left than are asked for
    tokens, words = scored(logits, greedy=greedy)
    values = logits.float().cpu().numpy()
    most = ops.MOST_LOGPROBS
    for row, count in enumerate(np.resize(COUNTS, 13).tolist()):
        if count == 0:
            assert (words[row] == -7).all()
            continue
        target = np.array([tokens[row]], np.int32)
        theirs = logprob_row_reference(row, values[row : row + 1], target, count - 1)
        width = theirs.token_ids.shape[1]
        assert words[row, 0] == theirs.ranks[0]
        assert words[row, 1 : 1 + width].tolist() == theirs.token_ids[0].tolist()
        assert (words[row, 1 + width : 1 + most] == -1).all()
        mine = words[row, 1 + most :].view(np.float32)
        np.testing.assert_allclose(mine[:width], theirs.logprobs[0], rtol=1e-5, atol=1e-5)
        assert (mine[width:] == -math.inf).all()


def test_rows_without_a_token_have_no_log_probabilities() -> None:
    logits = torch.randn(6, 100, device="cuda")
    logits[5, 7] = math.nan
    tokens, words = scored(logits, greedy=True)
    assert tokens[5] == ops.NOT_FINITE
    assert (words[5] == -7).all()
    assert words[4, 0] == 1


def test_log_probabilities_have_one_layout_on_both_sides() -> None:
    assert ops.load().LOGPROBS_BYTES == 4 * ops.LOGPROB_WORDS

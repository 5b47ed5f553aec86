"""The compiled sampler against numpy: the same tokens for any mixture of parameters, on every instruction set."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.models.isas import instruction_set
from tests.workers.test_sampler import Logits, batch_of
from trireme.models.native import load_native
from trireme.params import RowParams
from trireme.workers.sampling.logprobs import logprob_row, logprob_row_reference
from trireme.workers.sampling.sampler import Sampler
from trireme.workers.sampling.top_k_top_p import depths_of, masses

native = load_native()
ALL_VARIANTS = ["portable", "avx2", "avx512vnni"]
VARIANTS = [name for name in ALL_VARIANTS if name in native.isas()]


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


def some_row(rng: random.Random, vocab: int) -> tuple[list[int], int, RowParams]:
    """Any mixture of parameters over a vocabulary, and a short history."""

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.3 else default

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(rng.randint(1, most)))

    params = RowParams(
        max_tokens=100,
        min_tokens=maybe(rng.randint(0, 8), 0),
        temperature=rng.choice([0.0, 0.01, 0.3, 0.8, 1.0, 1.7, 20.0, 100.0]),
        top_k=maybe(rng.randint(1, vocab), 0),
        top_p=maybe(rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 0.999999]), 1.0),
        min_p=maybe(rng.choice([1e-9, 0.01, 0.05, 0.3, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.5, 1.1, 4.0]), 1.0),
        frequency_penalty=maybe(rng.choice([-2.0, 0.3, 2.0]), 0.0),
        presence_penalty=maybe(rng.choice([-1.0, 1.5]), 0.0),
        seed=rng.randint(-(2**63), 2**63 - 1),
        choice=rng.randrange(128),
        eos_token_ids=maybe((0,), ()),
        logit_bias=maybe(tuple((token, rng.choice([-100.0, 5.0])) for token in ids(3)), ()),
        bad_token_ids=maybe(tuple(ids(2) for _ in range(rng.randint(1, 6))), ()),
        allowed_token_ids=maybe(ids(40), ()),
        logprobs=maybe(rng.randint(0, 20), -1),
    )
    tokens = [rng.randrange(vocab) for _ in range(rng.randint(1, 30))]
    return tokens, rng.randint(1, len(tokens)), params


def some_logits(seed: int, rows: int, vocab: int) -> Logits:
    """Rows as models give them, rows with many equal values, and rows with barred tokens."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, vocab)) * rng.choice([0.0, 0.5, 2.0, 8.0], (rows, 1))).astype(np.float32)
    for row in logits:
        kind = rng.integers(4)
        if kind == 0:
            row[:] = row.round(1)
        elif kind == 1:
            row[rng.random(vocab) < 0.3] = -np.inf
        elif kind == 2:
            row[rng.integers(0, vocab, 5)] += 9
    return logits


@pytest.mark.parametrize(("vocab", "rounds"), [(1, 5), (24, 40), (300, 40), (5000, 10)])
def test_equal_to_numpy(isa: str, vocab: int, rounds: int) -> None:
    """Tokens and faults exactly; log-probabilities to the last digits; and nothing changed in the logits."""
    rng = random.Random(vocab)
    sampler, reference = Sampler(vocab), Sampler(vocab, native=False)
    for seed in range(rounds):
        check_equal(sampler, reference, [some_row(rng, vocab) for _ in range(8)], seed)


def check_equal(sampler: Sampler, reference: Sampler, rows: list[Any], seed: int) -> None:
    batch, slots = batch_of(*rows, vocab=sampler.vocab_size), np.arange(len(rows))
    logits = some_logits(seed, len(rows), sampler.vocab_size)
    before = logits.copy()
    got, want = sampler.sample(logits, slots, batch), reference.sample(logits, slots, batch)
    assert logits.tobytes() == before.tobytes()
    assert (got.rows, got.tokens) == (want.rows, want.tokens)
    assert got.faults == want.faults
    for mine, theirs in zip(got.logprobs, want.logprobs, strict=True):
        assert mine.rid == theirs.rid
        assert mine.token_ids.tolist() == theirs.token_ids.tolist()
        assert mine.ranks.tolist() == theirs.ranks.tolist()
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-6, atol=2e-5)


def test_a_large_vocabulary(isa: str) -> None:
    """Every way through the cuts at the size of a real model."""
    vocab = 49152
    logits = some_logits(3, 24, vocab)
    settings_ = [
        RowParams(9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=i)
        for i, (temperature, top_k, top_p, min_p) in enumerate(
            (t, k, p, m)
            for t in (0.8, 3.0)
            for k in (0, 50, 9000)
            for p, m in ((1.0, 0.0), (0.95, 0), (1.0, 0.05), (0.9, 0.1))
        )
    ]
    batch, slots = batch_of(*[([1], 1, params) for params in settings_], vocab=vocab), np.arange(24)
    got = Sampler(vocab).sample(logits, slots, batch)
    assert got.tokens == Sampler(vocab, native=False).sample(logits, slots, batch).tokens


def test_masses_are_those_of_the_exponential() -> None:
    depths = np.linspace(0, 30, 100_001).astype(np.float32)
    exact = np.exp(-depths.astype(np.float64)) * 2**30
    assert np.abs(masses(depths) - exact).max() <= 2**30 * 2e-7
    assert masses(np.array([0.0, np.inf], np.float32)).tolist() == [2**30, 0]
    assert depths_of(np.array([1.0, -np.inf], np.float32), 1.0, 0.5).tolist() == [0.0, np.inf]


@pytest.mark.parametrize("vocab", [5, 257, 49152])
def test_prompt_logprobs(isa: str, vocab: int) -> None:
    """Many positions in one call, equal to each alone, near numpy's."""
    logits = some_logits(5, 9, vocab)
    targets = logits.argmax(axis=1).astype(np.int32)
    entry = logprob_row(7, logits, targets, 4)
    theirs = logprob_row_reference(7, logits, targets, 4)
    assert entry.token_ids.tolist() == theirs.token_ids.tolist()
    assert entry.ranks.tolist() == theirs.ranks.tolist()
    np.testing.assert_allclose(entry.logprobs, theirs.logprobs, rtol=1e-6, atol=2e-5)
    for i in range(9):
        alone = logprob_row(7, logits[i : i + 1], targets[i : i + 1], 4)
        assert alone.logprobs.tobytes() == entry.logprobs[i : i + 1].tobytes()
    logits[3, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        logprob_row(7, logits, targets, 4)


def test_a_row_left_open_goes_to_numpy() -> None:
    """Two equal scores cannot be told apart by other logarithms: the definition decides, and only for that row."""
    sampler = Sampler(24)
    batch = batch_of(([1], 1, RowParams(4, seed=1)), ([1], 1, RowParams(4, seed=2)))
    logits, slots = some_logits(1, 2, 24), np.arange(2)
    want = sampler.sample(logits, slots, batch)
    run = sampler._native.run  # type: ignore[union-attr]

    def undecided(*args: Any) -> Any:
        answers = run(*args)
        answers.tokens[0] = -1
        return answers

    sampler._native.run = undecided  # type: ignore[method-assign,union-attr]
    assert sampler.sample(logits, slots, batch).tokens == want.tokens

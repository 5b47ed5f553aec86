"""The sampler against a plain reference written here, row by row; and rows that must not feel their batch-mates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.models.rows import new_row, plan_of
from trireme.params import RowParams
from trireme.workers.batch import Batch
from trireme.workers.logits_processors import LogitRules
from trireme.workers.sampling.gumbel import gumbels, noise_key
from trireme.workers.sampling.logprobs import logprob_row
from trireme.workers.sampling.sampler import Sampled, Sampler
from trireme.workers.sampling.top_k_top_p import nucleus, top_ids

VOCAB = 24
Logits = NDArray[np.float32]


def batch_of(*rows: tuple[list[int], int, RowParams], vocab: int = VOCAB) -> Batch:
    """A batch whose slots 0, 1, ... hold (tokens, num_prompt, params)."""
    batch = Batch(max(len(rows), 1) + 2, 256, 4, vocab, 1000, poison=True)
    batch.apply(plan_of(new=[new_row(i, tokens, params, num_prompt=n) for i, (tokens, n, params) in enumerate(rows)]))
    assert not batch.faults
    return batch


def sample(logits: Logits, batch: Batch, rows: list[int]) -> Sampled:
    return Sampler(batch.vocab_size).sample(logits, np.array(rows), batch)


def sample_one(logits: Logits, tokens: list[int], num_prompt: int, params: RowParams) -> int:
    batch = batch_of((tokens, num_prompt, params), vocab=logits.size)
    result = sample(logits[None], batch, [0])
    assert result.faults == []
    return result.tokens[0]


# ---------------------------------------------------------------- the reference


def reference_logits(logits: Logits, tokens: list[int], num_prompt: int, p: RowParams) -> list[float]:
    """Penalties, bias, bars, by the book."""
    z = [np.float32(value) for value in logits.tolist()]
    outputs = tokens[num_prompt:]
    for token in set(tokens):
        if p.repetition_penalty != 1.0:
            rate = np.float32(p.repetition_penalty)
            z[token] = z[token] / rate if z[token] > 0 else z[token] * rate
        if token in outputs:
            z[token] -= np.float32(p.frequency_penalty) * np.float32(outputs.count(token))
            z[token] -= np.float32(p.presence_penalty)
    for token, bias in p.logit_bias:
        z[token] += np.float32(bias)
    masked = set(range(len(z))) - set(p.allowed_token_ids) if p.allowed_token_ids else set()
    masked |= {s[-1] for s in p.bad_token_ids if tokens[len(tokens) - len(s) + 1 :] == list(s[:-1])}
    if len(outputs) < p.min_tokens:
        masked |= {*p.eos_token_ids, *p.stop_token_ids}
    return [-math.inf if token in masked else float(value) for token, value in enumerate(z)]


def reference_token(logits: Logits, tokens: list[int], num_prompt: int, p: RowParams) -> int | None:
    """The whole definition over Python floats. None when the row must fail. Skips examples on a knife's edge of top-p."""
    z = reference_logits(logits, tokens, num_prompt, p)
    order = sorted(range(len(z)), key=lambda token: (-z[token], token))
    peak = z[order[0]]
    if peak == -math.inf:
        return None
    if p.is_greedy:
        return order[0]
    stay = [token for token in order if z[token] > -math.inf]
    if 0 < p.top_k < len(z):
        stay = stay[: p.top_k]
    weight = {token: math.exp((z[token] - peak) / p.temperature) for token in stay}
    if p.top_p < 1.0:
        total, reached, kept = sum(weight.values()), 0.0, []
        for token in stay:
            kept.append(token)
            reached += weight[token]
            assume(abs(reached - p.top_p * total) > 1e-5 * total)
            if reached >= p.top_p * total:
                break
        stay = kept
    if p.min_p > 0.0:
        assume(all(abs(weight[token] - p.min_p) > 1e-5 for token in stay[1:]))
        stay = [token for token in stay if weight[token] >= p.min_p]
    noise = gumbels(noise_key(p.seed, p.choice, len(tokens)), np.arange(len(z)))
    return max(sorted(stay), key=lambda token: (z[token] - peak) / p.temperature + float(noise[token]))


TOKEN = st.integers(0, VOCAB - 1)


@st.composite
def row_params(draw: Any) -> RowParams:
    """Any mixture of sampling parameters over a vocabulary of 24."""

    def maybe(strategy: Any, default: Any) -> Any:
        return draw(st.one_of(st.just(default), strategy))

    return RowParams(
        max_tokens=100,
        min_tokens=maybe(st.integers(0, 8), 0),
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.5])),
        top_k=maybe(st.integers(-1, VOCAB + 2), 0),
        top_p=maybe(st.floats(0.05, 1.0), 1.0),
        min_p=maybe(st.floats(0.0, 0.9), 0.0),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.3, 4.0]), 1.0),
        frequency_penalty=maybe(st.sampled_from([-2.0, 0.5, 2.0]), 0.0),
        presence_penalty=maybe(st.sampled_from([-1.0, 1.5]), 0.0),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        choice=draw(st.integers(0, 3)),
        eos_token_ids=maybe(st.just((2,)), ()),
        stop_token_ids=maybe(st.just((3, 999)), ()),
        logit_bias=maybe(st.lists(st.tuples(TOKEN, st.sampled_from([-100.0, -1.0, 5.0])), max_size=3).map(tuple), ()),
        bad_token_ids=maybe(
            st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), min_size=1, max_size=6).map(tuple), ()
        ),
        allowed_token_ids=maybe(st.lists(TOKEN, min_size=1, max_size=6, unique=True).map(tuple), ()),
        logprobs=maybe(st.integers(0, 5), -1),
    )


@st.composite
def whole_row(draw: Any) -> tuple[list[int], int, RowParams]:
    tokens = draw(st.lists(TOKEN, min_size=1, max_size=12))
    return tokens, draw(st.integers(1, len(tokens))), draw(row_params())


def random_logits(seed: int, rows: int, vocab: int = VOCAB) -> Logits:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).round(2).astype(np.float32)


@settings(deadline=None)
@given(whole_row(), st.integers(0, 1000))
def test_token_equals_the_reference(row: tuple[list[int], int, RowParams], seed: int) -> None:
    tokens, num_prompt, params = row
    logits = random_logits(seed, 1)
    expected = reference_token(logits[0], tokens, num_prompt, params)
    result = sample(logits, batch_of(row), [0])
    if expected is None:
        assert result.rows == []
        assert "mask every one" in result.faults[0].error
    else:
        assert (result.rows, result.tokens) == ([0], [expected])


@settings(deadline=None)
@given(st.lists(whole_row(), min_size=2, max_size=5), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_a_row_does_not_feel_its_batch_mates(rows: list[Any], seed: int, rng: Any) -> None:
    """Tokens, logprobs and faults of each row: the same alone and in any company, in any order. Logits stay untouched."""
    logits = random_logits(seed, len(rows))
    order = list(range(len(rows)))
    rng.shuffle(order)
    shuffled = logits[order]
    together = sample(shuffled, batch_of(*rows), order)
    assert np.array_equal(shuffled, logits[order])
    by_row = dict(zip(together.rows, together.tokens, strict=True))
    for i, row in enumerate(rows):
        alone = sample(logits[i : i + 1], batch_of(row), [0])
        assert alone.tokens == [by_row[i]] if i in by_row else alone.tokens == []
        mine = [entry for entry in together.logprobs if entry.rid == i]
        assert len(mine) == len(alone.logprobs)
        for a, b in zip(mine, alone.logprobs, strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes()
            assert a.token_ids.tolist() == b.token_ids.tolist()


# ---------------------------------------------------------------- cases of public bug reports


def generate(rows: list[tuple[list[int], RowParams]], logits: list[float], count: int) -> list[list[int]]:
    """Runs rows together on constant logits for `count` steps; their outputs."""
    vocab = len(logits)
    batch = batch_of(*[(prompt, len(prompt), params) for prompt, params in rows], vocab=vocab)
    outputs: list[list[int]] = [[] for _ in rows]
    slots = list(range(len(rows)))
    for _ in range(count):
        result = sample(np.tile(np.array(logits, np.float32), (len(rows), 1)), batch, slots)
        assert result.rows == slots
        for slot, token in zip(slots, result.tokens, strict=True):
            outputs[slot].append(token)
        batch.apply(plan_of(rows=slots, tokens=result.tokens))
    return outputs


def test_seed_is_kept_when_a_batch_mate_has_none() -> None:
    """O04: a seeded row repeats in every arrangement, an unseeded mate (whose seed the front end draws) does not."""
    logits = [1.0] * 50
    a = RowParams(16, temperature=0.8, seed=42)
    alone = generate([([7], a)], logits, 16)[0]
    mates = []
    for seed in (11, -5, 2**62, 42):
        b = RowParams(16, temperature=0.8, seed=seed)
        got_a, got_b = generate([([7], a), ([9, 9, 9], b)], logits, 16)
        assert got_a == alone
        assert generate([([9, 9, 9], b), ([7], a)], logits, 16) == [got_b, got_a]
        mates.append(tuple(got_b))
    assert len(set(mates)) > 1
    assert len(set(alone)) > 4


def test_penalties_do_not_count_padding() -> None:
    """O05: prompts of different length in one batch; PAD is id 0."""
    logits = [5.0, 4.0] + [-10.0] * 14
    x = RowParams(5, temperature=0.0, frequency_penalty=2.0)
    y = RowParams(5, temperature=0.0)
    assert generate([([7, 7, 7], x)], logits, 5) == [[0, 1, 0, 1, 0]]
    assert generate([([7, 7, 7], x), ([3] * 40, y)], logits, 5) == [[0, 1, 0, 1, 0], [0] * 5]
    assert generate([([3] * 40, y), ([7, 7, 7], x)], logits, 5) == [[0] * 5, [0, 1, 0, 1, 0]]


def test_bias_of_100_forces_a_token() -> None:
    """O15: the last id of the vocabulary, greedy; and -100 on the favourite keeps it away."""
    logits = random_logits(1, 1)[0]
    assert sample_one(logits, [1], 1, RowParams(1, temperature=0.0, logit_bias=((VOCAB - 1, 100.0),))) == VOCAB - 1
    best = int(logits.argmax())
    assert sample_one(logits, [1], 1, RowParams(1, temperature=0.0, logit_bias=((best, -100.0),))) != best


@pytest.mark.parametrize(
    "bad", [{"logit_bias": ((VOCAB, 1.0),)}, {"allowed_token_ids": (-1,)}, {"bad_token_ids": ((1, VOCAB),)}]
)
def test_id_outside_the_vocabulary_fails_its_row_only(bad: dict[str, Any]) -> None:
    """O15: the row that slipped past the front end's check is refused when placed; its mate runs on."""
    batch = Batch(4, 32, 4, VOCAB, 10)
    batch.apply(plan_of(new=[new_row(0, [1], RowParams(4, **bad)), new_row(1, [1], RowParams(4, temperature=0.0))]))
    assert [fault.row for fault in batch.row_faults(np.array([0, 1]))] == [0]
    assert sample(random_logits(0, 1), batch, [1]).rows == [1]


def test_logits_that_are_not_finite_fail_their_row_only() -> None:
    """R16: NaN, +inf and nothing-finite end in a fault; -inf beside finite values is a token that cannot come."""
    params = RowParams(4, temperature=0.0)
    batch = batch_of(*[([1], 1, params)] * 6)
    logits = random_logits(2, 6)
    clean = sample(logits, batch, list(range(6)))
    logits[1, 5] = np.nan
    logits[2, 0] = np.inf
    logits[3] = -np.inf
    logits[4, int(logits[4].argmin())] = -np.inf
    got = sample(logits, batch, list(range(6)))
    assert got.rows == [0, 4, 5]
    assert got.tokens == [clean.tokens[0], clean.tokens[4], clean.tokens[5]]
    assert [fault.row for fault in got.faults] == [1, 2, 3]
    assert all("not finite" in fault.error for fault in got.faults)


@pytest.mark.parametrize("native", [True, False], ids=["native", "numpy"])
def test_an_error_in_one_rows_sampling_is_its_own(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R16: whatever a row's rules raise, and wherever in the batch it stands."""
    sampler = Sampler(VOCAB, native=native)
    logits, rows = random_logits(4, 7), np.arange(7)
    batch = batch_of(*[([1], 1, RowParams(4, seed=i, logit_bias=((3, 1.0),))) for i in range(7)])
    clean = sampler.sample(logits, rows, batch)
    for bad in range(7):
        rules = batch.rules[bad]
        with monkeypatch.context() as patch:
            for method in ("describe", "apply"):
                patch.setattr(LogitRules, method, raising_for(rules, getattr(LogitRules, method)))
            got = sampler.sample(logits, rows, batch)
        assert [fault.row for fault in got.faults] == [bad]
        assert "out of luck" in got.faults[0].error
        assert got.rows == [row for row in range(7) if row != bad]
        assert got.tokens == [clean.tokens[row] for row in got.rows]


def raising_for(broken: object, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(rules: object, *args: Any) -> Any:
        if rules is broken:
            raise RuntimeError("out of luck")
        return method(rules, *args)

    return call


# ---------------------------------------------------------------- parts


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -3.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=300),
    st.integers(1, 310),
)
def test_top_ids_break_ties_towards_lower_ids(values: list[float], k: int) -> None:
    order = sorted((i for i, v in enumerate(values) if v > -math.inf), key=lambda i: (-values[i], i))
    assert top_ids(np.array(values, np.float32), k).tolist() == order[:k]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3000), st.sampled_from([0.0, 0.2, 2.0, 20.0]), st.floats(0.01, 0.999))
def test_nucleus_is_the_smallest_set_that_reaches_top_p(seed: int, size: int, spread: float, top_p: float) -> None:
    """The set reaches p, and its least likely member is needed."""
    z = np.random.default_rng(seed).standard_normal(size) * spread
    depths = (z.max() - z).astype(np.float32)
    ids = nucleus(depths, top_p)
    mass = np.exp(-depths.astype(np.float64))
    mass /= mass.sum()
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert mass[ids].sum() >= top_p - 1e-5
    assert mass[ids].sum() - mass[ids].min() < top_p + 1e-5
    outside = np.setdiff1d(np.arange(size), ids)
    assert outside.size == 0 or depths[outside].min() >= depths[ids].max()


def test_logprobs_are_of_the_untouched_logits() -> None:
    """log-softmax by definition; rank counts strictly likelier tokens; the k likeliest come in order."""
    logits = random_logits(5, 3)
    params = RowParams(4, temperature=0.0, logit_bias=((4, 100.0),), logprobs=3)
    batch = batch_of(*[([1], 1, params)] * 3)
    result = sample(logits.copy(), batch, [0, 1, 2])
    assert result.tokens == [4, 4, 4]
    for i, entry in enumerate(result.logprobs):
        exact = logits[i].astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        order = sorted(range(VOCAB), key=lambda t: (-exact[t], t))
        assert entry.token_ids.tolist() == [[4, *order[:3]]]
        np.testing.assert_allclose(entry.logprobs[0], exact[[4, *order[:3]]], atol=1e-5)
        assert entry.ranks.tolist() == [1 + sum(value > exact[4] for value in exact)]
        assert (entry.logprobs <= 0).all()


def test_logprobs_of_a_vocabulary_smaller_than_k() -> None:
    entry = logprob_row(0, np.zeros((1, 3), np.float32), np.array([1], np.int32), 20)
    assert entry.token_ids.tolist() == [[1, 0, 1, 2]]
    assert entry.ranks.tolist() == [1]


def test_min_tokens_bars_eos_and_stop_ids_until_reached() -> None:
    logits = [0.0] * VOCAB
    logits[2], logits[3], logits[5] = 9.0, 8.0, 7.0
    params = RowParams(8, min_tokens=3, temperature=0.0, eos_token_ids=(2,), stop_token_ids=(3,))
    assert generate([([2, 3], params)], logits, 5) == [[5, 5, 5, 2, 2]]


def test_bad_words_bar_the_completion_of_an_n_gram_that_began_in_the_prompt() -> None:
    logits = [0.0, 3.0, 2.0, 1.0]
    params = RowParams(8, temperature=0.0, bad_token_ids=((3, 1), (2, 2, 2), (0,)))
    assert generate([([3], params)], logits, 3) == [[2, 1, 1]]
    assert generate([([2, 2], RowParams(8, temperature=0.0, bad_token_ids=((2, 2, 2), (1,))))], logits, 2) == [[3, 2]]

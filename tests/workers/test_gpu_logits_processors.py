"""Logit rules on the device: a record says what workers.logits_processors does; rows that have one, or want
log-probabilities, never wait for the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.workers.device_twin import VOCAB
from tests.workers.test_gpu_runner import CPU, alone, make_runner
from trireme.models.cuda.ops import JOB, MOST_WORD, OUTPUTS, touched_words
from trireme.models.cuda.reference import note_output_reference, ruled_logits_reference
from trireme.params import RowParams
from trireme.transport.wire.messages import StepResult
from trireme.workers.cuda.device_state import job_of
from trireme.workers.cuda.logits_processors import DeviceRules, is_for_device
from trireme.workers.cuda.runner import GpuRunner
from trireme.workers.cuda.staging import Answer
from trireme.workers.logits_processors import LogitRules, Tokens
from trireme.workers.sampling.sampler import ALL_MASKED, Sampler

PENALTIES = RowParams(8, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
MANY = {
    "penalties": PENALTIES,
    "seeded": RowParams(8, temperature=1.0, top_k=9, top_p=0.9, seed=4, frequency_penalty=1.5),
    "bias": RowParams(8, logit_bias=((95, 9.0), (3, -2.0), (17, 4.0))),
    "allowed": RowParams(8, allowed_token_ids=(90, 4, 33, 4)),
    "words": RowParams(8, bad_token_ids=(*((token, (token + 17) % 96) for token in range(96)), (5, 6, 7, 1))),
    "scored": RowParams(8, temperature=0.8, seed=9, logprobs=3, presence_penalty=1.0, min_p=0.05),
    "best": RowParams(8, logprobs=20),
    "own": RowParams(8, temperature=1.2, logprobs=0),
    "barred": RowParams(8, bad_token_ids=((7,), (70,), (50,)), min_tokens=5, eos_token_ids=(*range(64),)),
}


def tokens_of(vocab: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab - 1), max_size=9)


@st.composite
def ruled_row(draw: Any) -> tuple[int, RowParams, list[int], int, list[int]]:
    """A vocabulary, parameters with rules, tokens, how many of them are prompt, and what is sampled next."""
    vocab = draw(st.sampled_from([5, 31, 32, 33, 96, 200]))
    bias = st.tuples(st.integers(0, vocab - 1), st.floats(-100, 100, width=32))
    few = st.integers(0, min(vocab, 4) - 1)  # so that words come
    word = st.lists(few, min_size=2, max_size=MOST_WORD).map(tuple)
    params = RowParams(
        40,
        min_tokens=draw(st.integers(0, 6)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.9, -0.1])),
        eos_token_ids=tuple(draw(tokens_of(vocab))),
        stop_token_ids=tuple(draw(tokens_of(vocab + 5))),
        logit_bias=tuple(draw(st.lists(bias, max_size=6))),
        bad_token_ids=tuple((token,) for token in draw(tokens_of(vocab))) + tuple(draw(st.lists(word, max_size=5))),
        allowed_token_ids=tuple(draw(tokens_of(vocab))),
    )
    token = st.one_of(few, st.integers(0, vocab - 1))
    tokens, sampled = draw(st.lists(token, min_size=1, max_size=12)), draw(st.lists(token, max_size=6))
    return vocab, params, tokens, draw(st.integers(1, len(tokens))), sampled


def device_job(rules: DeviceRules, params: RowParams, host: LogitRules, vocab: int, tokens: Tokens) -> Any:
    jobs = np.zeros(1, JOB)
    jobs[0] = job_of(params, vocab)
    assert rules.admit(0)
    rules.write(jobs, {0: (0, host, tokens)}, lambda at, values: (torch.from_numpy(at), torch.from_numpy(values)))
    return jobs[0]


@settings(deadline=None, max_examples=150)
@given(ruled_row(), st.integers(0, 2**32), st.booleans())
def test_a_record_says_what_the_rules_do(row: Any, seed: int, are_told: bool) -> None:
    """Bit for bit, from the first token on, whether the device counts by itself or is told."""
    vocab, params, tokens, num_prompt, sampled = row
    rng = np.random.default_rng(seed)
    host = LogitRules(params, vocab, np.array(tokens, np.int32), num_prompt)
    rules = DeviceRules(1, vocab, CPU)
    job = device_job(rules, params, host, vocab, np.array(tokens, np.int32))
    for token in [*sampled, None]:
        logits = (rng.standard_normal(vocab) * 8).astype(np.float32)
        logits[rng.integers(vocab)] = -np.inf
        found = ruled_logits_reference(torch.from_numpy(logits), job, len(tokens)).numpy()
        expected = logits.copy()
        host.apply(expected, np.array(tokens, np.int32))
        np.testing.assert_array_equal(found, expected)
        if token is not None:
            tokens.append(token)
            host.add_output(token)
            rules.count(0, token) if are_told else note_output_reference(job, vocab, token)


def steady(runner: GpuRunner, jobs: Sequence[tuple[list[int], RowParams]], steps: int) -> list[StepResult]:
    """All jobs, one row each, with every step launched before the tokens of the last one were seen."""
    new = [new_row(i, prompt, params, blocks=range(9 * i, 9 * i + 9)) for i, (prompt, params) in enumerate(jobs)]
    rows, sizes = [*range(len(jobs))], [len(prompt) for prompt, _ in jobs]
    tickets = [runner.launch(plan_of(new=new, rows=rows, num_tokens=sizes))]
    for i in range(1, steps):
        plan = plan_of(step=1 + i, rows=rows, num_computed=[size + i - 1 for size in sizes], tokens=[-1] * len(rows))
        tickets.append(runner.launch(plan))
    return [ticket.result() for ticket in tickets]


@pytest.mark.parametrize("kinds", [[kind] for kind in MANY] + [["penalties", "scored", "barred", "best"]], ids=str)
def test_rows_with_rules_never_wait_for_the_host(monkeypatch: pytest.MonkeyPatch, kinds: list[str]) -> None:
    jobs = [([5, 6, 7 + i], MANY[kind]) for i, kind in enumerate(kinds)]
    expected = [alone(job) for job in jobs]
    runner, _ = make_runner(sizes=[(0, 4)])
    monkeypatch.setattr(Answer, "has_come", lambda self: False)
    monkeypatch.setattr(Sampler, "sample", None)
    sizes: list[int] = []
    run = runner._graphs.run
    monkeypatch.setattr(
        runner._graphs,
        "run",
        lambda size, batch, step, *rest: sizes.append(step.rows.size) or run(size, batch, step, *rest),
    )
    found = steady(runner, jobs, 8)
    assert sizes == [len(jobs)] * 7
    assert np.array([rows_and_tokens(result)[1] for result in found]).T.tolist() == [job.outputs for job in expected]
    for row, job in enumerate(expected):
        mine = [entry for result in found for entry in result.logprobs if entry.rid == row]
        for name in ("token_ids", "logprobs", "ranks"):
            assert [getattr(entry, name).tolist() for entry in mine] == [
                getattr(entry, name).tolist() for entry in job.logprobs
            ]


def test_a_row_beyond_the_room_stays_with_the_host_and_the_next_one_gets_it() -> None:
    runner, _ = make_runner()
    runner._rules.most = 1
    first, second = ([5, 6], PENALTIES), ([8, 9], MANY["bias"])
    new = [new_row(row, prompt, params, blocks=[2 + row]) for row, (prompt, params) in enumerate((first, second))]
    found = rows_and_tokens(runner.execute(plan_of(new=new, rows=[0, 1], num_tokens=[2, 2])))
    assert found == ([0, 1], [alone(first).outputs[0], alone(second).outputs[0]])
    assert [0 in runner._rules, 1 in runner._rules] == [True, False]
    third = new_row(3, *second, blocks=[7])
    found = rows_and_tokens(runner.execute(plan_of(step=2, freed=[0], new=[third], rows=[3], num_tokens=[2])))
    assert found == ([3], [alone(second).outputs[0]])
    assert 3 in runner._rules


def test_records_live_as_long_as_their_rows() -> None:
    runner, _ = make_runner()
    runner.execute(plan_of(new=[new_row(0, [5], PENALTIES, blocks=[1])], rows=[0]))
    assert list(runner._rules._records) == [0]
    runner.execute(plan_of(step=2, freed=[0], new=[new_row(1, [5], RowParams(3), blocks=[1])], rows=[1]))
    assert not runner._rules._records


def test_room_is_bounded_by_bytes() -> None:
    assert DeviceRules(512, 128256, CPU).most == 317
    assert DeviceRules(16, 128256, CPU).most == 16
    assert DeviceRules(4, 128256, CPU, pool_bytes=0).most == 0


def test_rules_that_bar_all_end_their_row_alone() -> None:
    runner, _ = make_runner()
    nothing = RowParams(4, allowed_token_ids=(3,), bad_token_ids=((3,),))
    new = [new_row(0, [5], nothing, blocks=[1]), new_row(1, [6], PENALTIES, blocks=[2])]
    result = runner.execute(plan_of(new=new, rows=[0, 1]))
    assert [(fault.row, fault.error, fault.by_request) for fault in result.faults] == [(0, ALL_MASKED, True)]
    assert rows_and_tokens(result) == ([1], alone(([6], PENALTIES)).outputs[:1])


def test_what_the_device_leaves_to_the_host() -> None:
    assert is_for_device(PENALTIES)
    assert is_for_device(RowParams(4, bad_token_ids=((3,), (4,))))
    assert is_for_device(RowParams(4, bad_token_ids=((3,), tuple(range(8)))))
    assert not is_for_device(RowParams(4, bad_token_ids=((3,), tuple(range(9)))))
    assert is_for_device(RowParams(4, logprobs=20))
    assert not is_for_device(RowParams(4, logprobs=21))


@pytest.mark.parametrize("keeps", [True, False])
def test_a_step_of_the_host_counts_in_the_records(keeps: bool) -> None:
    """A row that scores its prompt makes its steps slow; rows beside it, old and new, know what was sampled there."""
    runner, _ = make_runner(keeps=keeps)
    often = RowParams(9, frequency_penalty=0.01)
    jobs = [([5, 6], PENALTIES), ([8, 9], RowParams(3, prompt_logprobs=0)), ([7, 4, 4], often)]
    expected = [alone(job).outputs for job in jobs]
    found: list[list[int]] = [[], [], []]
    new = [
        new_row(row, prompt, params, blocks=range(9 * row, 9 * row + 9)) for row, (prompt, params) in enumerate(jobs)
    ]

    def take(rows: list[int], **placed: Any) -> None:
        fresh = [not found[row] for row in rows]
        result = runner.execute(
            plan_of(
                rows=rows,
                num_tokens=[len(jobs[row][0]) if is_new else 1 for row, is_new in zip(rows, fresh, strict=True)],
                num_computed=[0 if not found[row] else len(jobs[row][0]) + len(found[row]) - 1 for row in rows],
                tokens=[-1 if keeps or not found[row] else found[row][-1] for row in rows],
                **placed,
            )
        )
        for row, token in zip(*rows_and_tokens(result), strict=True):
            found[row].append(token)

    take([0], new=new[:1])
    take([0, 1, 2], new=new[1:])
    for _ in range(2):
        take([0, 1, 2])
    told = {row: marks_of(runner, row) for row in (0, 2)}
    assert told == {row: dict(Counter(found[row])) for row in (0, 2)}
    for _ in range(4):
        take([0, 2])
    assert found == [expected[0], expected[1], expected[2][:7]]
    assert runner.num_slow == 3


def marks_of(runner: GpuRunner, row: int) -> dict[int, int]:
    """How often each token was output, as the device has it."""
    marks = runner._rules._records[row][touched_words(VOCAB) : touched_words(VOCAB) + VOCAB].numpy() & OUTPUTS
    return {token: int(marks[token]) for token in np.flatnonzero(marks).tolist()}

"""The engine core as a whole: rows in, tokens and exactly one end out, whatever happens on the way."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.engine_driver import FRONT, Driver, make_limits
from trireme.engine_core.core import EngineCore
from trireme.errors import EngineError
from trireme.params import RowParams
from trireme.transport.wire.columns import pack
from trireme.transport.wire.messages import StepResult, Submit
from trireme.workers.fake import FakeOptions


def test_one_row_runs_to_its_length() -> None:
    driver = Driver()
    row = driver.submit(5, max_tokens=6)
    driver.run()
    assert row.tokens == driver.solo(row)
    assert len(row.tokens) == 6
    assert row.end.reason == "length"
    assert [first.num_cached for first in row.firsts] == [0]


def test_eos_ends_a_row_but_not_below_min_tokens() -> None:
    fake = FakeOptions(eos_every=3)
    driver = Driver(fake=fake)
    early = driver.submit(5, max_tokens=40, eos_token_ids=(257,))
    late = driver.submit(5, max_tokens=40, eos_token_ids=(257,), min_tokens=10)
    never = driver.submit(5, max_tokens=40)
    driver.run()
    assert early.end.reason == "stop"
    assert early.end.stop_token == early.tokens[-1] == 257
    assert 257 not in early.tokens[:-1]
    assert late.end.reason == "stop"
    assert len(late.tokens) > 10
    assert late.tokens[: len(early.tokens)] == early.tokens
    assert never.end.reason == "length"
    assert 257 in never.tokens


def test_max_len_ends_a_row() -> None:
    driver = Driver(make_limits(max_len=16))
    row = driver.submit(10, max_tokens=100)
    driver.run()
    assert len(row.tokens) == 6
    assert row.end.reason == "length"


def test_max_tokens_zero_ends_after_prefill_with_the_prompt_scored() -> None:
    driver = Driver(make_limits(chunk=4))
    row = driver.submit(10, max_tokens=0, prompt_logprobs=2)
    driver.run()
    assert row.tokens == []
    assert row.end.reason == "length"
    assert len(row.firsts) == 1
    scored = np.concatenate([scores.token_ids[:, 0] for scores in row.prompt_logprobs])
    assert scored.tolist() == row.prompt[1:]


def test_prompt_logprobs_come_once_although_the_row_is_preempted_and_the_prefix_is_cached() -> None:
    def scores_of(driver: Driver) -> np.ndarray:
        warm = driver.submit(9, max_tokens=1)
        driver.run()
        assert warm.end.reason == "length"
        row = driver.submit(9, max_tokens=12, prompt_logprobs=1)
        other = driver.submit(8, max_tokens=12)
        driver.run()
        driver.check_tokens(row)
        driver.check_tokens(other)
        assert np.concatenate([scores.token_ids[:, 0] for scores in row.prompt_logprobs]).tolist() == row.prompt[1:]
        return np.concatenate([scores.logprobs for scores in row.prompt_logprobs])

    tight, roomy = Driver(make_limits(num_blocks=7, max_len=28, chunk=3)), Driver()
    np.testing.assert_array_equal(scores_of(tight), scores_of(roomy))
    assert tight.core.scheduler.num_preemptions > 0


def test_sample_logprobs_reach_their_row() -> None:
    driver = Driver()
    plain = driver.submit(5, max_tokens=4)
    row = driver.submit(6, max_tokens=4, logprobs=3)
    driver.run()
    assert plain.logprobs == []
    assert [scores.token_ids[0, 0] for scores in row.logprobs] == row.tokens
    assert all(scores.token_ids.shape == (1, 4) for scores in row.logprobs)


def test_replayed_tokens_count_as_output() -> None:
    driver = Driver()
    whole = driver.submit(6, max_tokens=10)
    driver.run()
    moved = driver.submit(whole.prompt + whole.tokens[:4], max_tokens=10, num_replayed=4)
    driver.run()
    assert moved.tokens == whole.tokens[4:]
    nothing_left = driver.submit(whole.prompt + whole.tokens, max_tokens=10, num_replayed=10)
    assert nothing_left.end.reason == "length"
    driver.run()
    assert nothing_left.tokens == []


def test_abort_at_any_moment_ends_once_and_frees_everything() -> None:
    for aborted_after in range(12):
        driver = Driver(make_limits(chunk=3), depth=2)
        keep, drop = driver.submit(9), driver.submit(10)
        for _ in range(aborted_after):
            driver.plan()
            if len(driver.answers) == 2:
                driver.answer()
        driver.abort(drop)
        driver.abort(drop)
        driver.run()
        driver.check_tokens(keep)
        if drop.end.reason == "abort":
            assert len(drop.tokens) < 8


def test_a_dead_front_end_loses_its_rows_and_no_other() -> None:
    driver = Driver()
    mine = driver.submit(5, front="front-1")
    gone = [driver.submit(5 + i) for i in range(12)]
    driver.step()
    driver.core.front_gone(FRONT)
    driver.run()
    assert all(not row.ends for row in gone)
    driver.check_tokens(mine)
    assert driver.core.counters.abort == 12


def test_row_fault_ends_that_row_only_and_its_blocks_are_not_trusted() -> None:
    driver = Driver(fake=FakeOptions(row_fault_token=300))
    common = [(3 * i) % 200 for i in range(16)]
    bad = driver.submit([*common, 300, 1])
    mate = driver.submit([*common, 5, 6])
    other = driver.submit(7)
    driver.run()
    assert bad.end.reason == "error"
    assert bad.end.error_code == "engine_error"
    assert "scripted fault" in bad.end.error
    driver.check_tokens(mate)
    driver.check_tokens(other)
    again = driver.submit([*common, 5, 6])
    driver.run()
    assert again.tokens == mate.tokens


def test_rows_that_share_blocks_with_a_fault_are_recomputed_with_several_plans_in_flight() -> None:
    driver = Driver(make_limits(chunk=8), depth=2, fake=FakeOptions(row_fault_token=300))
    common = [(3 * i) % 200 for i in range(8)]
    bad = driver.submit([300, *common, *common], max_tokens=4)
    mate = driver.submit([300, *common, 9], max_tokens=4)  # has the same bad token: it faults by itself, later or never
    clean = driver.submit([*common, 9], max_tokens=4)
    driver.run()
    assert bad.end.reason == mate.end.reason == "error"
    driver.check_tokens(clean)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize(("chunk", "budget"), [(1, 64), (2, 2), (4, 4), (4, 64)])
def test_choices_of_one_faulty_prompt_all_end(chunk: int, budget: int, block_size: int, ahead: bool) -> None:
    """None goes on over what another one failed to write, and they do not throw each other out for ever."""
    prompt = [(3 * i) % 200 for i in range(16)]
    for place in (0, 4, 6, 11):
        limits = make_limits(chunk=chunk, max_num_tokens=budget, block_size=block_size)
        driver = Driver(limits, depth=2, ahead=ahead, fake=FakeOptions(row_fault_token=300))
        first = driver.submit(prompt[:9], max_tokens=12)
        driver.step()
        faulty = [driver.submit([*prompt[:place], 300, *prompt[place:]], choice=i, seed=1) for i in range(3)]
        mate = driver.submit([*prompt[:place], *prompt[4:]])
        driver.run()
        assert [row.end.reason for row in faulty] == ["error"] * 3
        driver.check_tokens(first)
        driver.check_tokens(mate)


@pytest.mark.parametrize(("depth", "ahead"), [(2, False), (3, False), (2, True)])
@pytest.mark.parametrize("prompt", [[300, 3], [1, 2, 300, 3]])
def test_a_row_that_wrote_what_another_failed_to_write_is_not_thrown_out(
    prompt: list[int], depth: int, ahead: bool
) -> None:
    """Two rows write equal blocks a step apart, and both fail: each ends by its own fault, at its first try."""
    for ends in ((1, 2), (1, 4), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3), (3, 4)):
        limits = make_limits(block_size=2, chunk=1, max_num_seqs=2)
        driver = Driver(limits, depth=depth, ahead=ahead, fake=FakeOptions(row_fault_token=300))
        others = [driver.submit([i], max_tokens=count) for i, count in enumerate(ends)]
        faulty = [driver.submit(prompt, choice=i, seed=1) for i in range(3)]
        driver.run()
        assert [row.end.reason for row in faulty] == ["error"] * 3
        assert [row.end.num_preemptions for row in faulty] == [0] * 3
        for other in others:
            driver.check_tokens(other)


def test_nobody_finds_what_was_computed_over_a_fault() -> None:
    """Neither the blocks of the row that failed nor those that its reader has filled after them."""
    driver = Driver(make_limits(chunk=8), depth=3, fake=FakeOptions(row_fault_token=300))
    common = [(3 * i) % 200 for i in range(8)]
    bad = driver.submit([*common[:7], 300], max_tokens=4)
    driver.plan()
    reader = driver.submit([*common[:7], 300, *common], max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    assert plan.num_computed == pack([8])
    driver.answer()
    assert bad.end.reason == "error"
    assert not driver.core.scheduler.cache.pool.index
    driver.run()
    assert reader.end.reason == "error"
    assert reader.end.num_preemptions == 1


def test_a_sharer_in_flight_when_the_fault_arrives_is_voided_and_recomputed() -> None:
    driver = Driver(depth=2, fake=FakeOptions(row_fault_token=300))
    common = [(3 * i) % 200 for i in range(8)]
    bad = driver.submit([*common, 300], max_tokens=4)
    driver.plan()
    mate = driver.submit([*common, 9, 10], max_tokens=4)
    plan = driver.plan()
    assert plan is not None
    assert plan.num_computed == pack([8]), "the mate reads blocks that the first plan was to fill"
    driver.answer()
    assert bad.end.reason == "error"
    again = driver.plan()
    assert again is not None
    assert again.num_computed == pack([0])
    driver.run()
    driver.check_tokens(mate)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"prompt": np.array([], np.int32)}, "prompt"),
        ({"prompt": np.array(3, np.int32)}, "prompt"),
        ({"prompt": np.array([[1, 2]], np.int32)}, "prompt"),
        ({"prompt": np.array([1, 2], np.int64)}, "int32"),
        ({"prompt": np.array([1, 320], np.int32)}, "320"),
        ({"prompt": np.array([1, -1], np.int32)}, "-1"),
        ({"prompt": np.zeros(64, np.int32)}, "maximum context length"),
        ({"num_replayed": 3}, "num_replayed"),
        ({"num_replayed": -1}, "num_replayed"),
        ({"salt": b"x" * 129}, "salt"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"params": RowParams(max_tokens=-1)}, "max_tokens"),
        ({"params": RowParams(max_tokens=1, min_tokens=2**40)}, "min_tokens"),
        ({"params": RowParams(max_tokens=1, temperature=float("nan"))}, "temperature"),
        ({"params": RowParams(max_tokens=1, logit_bias=((320, 1.0),))}, "logit_bias"),
        ({"params": RowParams(max_tokens=1, allowed_token_ids=(-1,))}, "allowed_token_ids"),
        ({"params": RowParams(max_tokens=1, bad_token_ids=((1, 999),))}, "bad_token_ids"),
        ({"params": RowParams(max_tokens=1, logprobs=10**6)}, "logprobs"),
        ({"params": RowParams(max_tokens=1, seed=2**63)}, "seed"),
        ({"waited_s": -1.0}, "waited_s"),
        ({"waited_s": 1e9}, "waited_s is 1000000000.0; it must be finite, at least 0 and at most 86400"),
        ({"waited_s": float("nan")}, "waited_s"),
    ],
)
def test_a_bad_submit_fails_alone(changes: dict[str, object], word: str) -> None:
    driver = Driver()
    good = driver.submit(5)
    fields: dict[str, object] = {"prompt": np.array([1, 2], np.int32), "params": RowParams(max_tokens=4), **changes}
    driver.core.submit("front-9", Submit(1, **fields), 0.0)  # type: ignore[arg-type]
    (end,) = driver.core.take_outputs()["front-9"].ends
    assert end.reason == "error"
    assert end.error_code == ("context_length_exceeded" if "context" in word else "invalid_value")
    assert word in end.error
    driver.run()
    driver.check_tokens(good)


def test_a_duplicate_rid_is_ignored() -> None:
    driver = Driver()
    row = driver.submit(5)
    front, rid = driver.rid_of(row)
    driver.core.submit(front, Submit(rid, np.array([1], np.int32), RowParams(max_tokens=3)), 0.0)
    driver.run()
    driver.check_tokens(row)
    assert driver.core.counters.duplicates == 1


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    driver = Driver(make_limits(max_waiting=3, max_waiting_tokens=30))
    rows = [driver.submit(4) for _ in range(4)]
    assert rows[3].end.error_code == "overloaded"
    driver.run()
    lone = driver.submit(40)  # above the token bound, but nothing else is queued
    second = driver.submit(1)
    assert not lone.ends
    assert second.end.error_code == "overloaded"
    driver.run()
    assert lone.end.reason == "length"
    assert driver.core.counters.refused == 2


def test_waiting_has_a_deadline_and_running_has_none() -> None:
    driver = Driver(make_limits(max_num_seqs=1, queue_timeout=10.0))
    first, second, third = driver.submit(4, max_tokens=20), driver.submit(4), driver.submit(4, deadline_s=3.0)
    driver.step()
    assert driver.core.next_deadline() is not None
    driver.core.tick(5.0)
    driver.collect()
    assert third.end.error_code == "overloaded"
    assert not second.ends
    driver.core.tick(11.0)
    driver.collect()
    assert second.end.error_code == "overloaded"
    driver.run()
    assert first.end.reason == "length"


def test_draining_refuses_new_rows_and_finishes_old_ones() -> None:
    driver = Driver()
    old = driver.submit(5)
    driver.core.draining = True
    new = driver.submit(5)
    driver.run()
    assert old.end.reason == "length"
    assert new.end.error_code == "overloaded"


def test_an_answer_that_does_not_fit_the_plan_is_an_engine_error() -> None:
    driver = Driver()
    driver.submit(5)
    driver.submit(6)
    with pytest.raises(EngineError, match="step 9"):
        driver.core.on_result(StepResult(9, b"", b""), 0.0)
    driver.plan()
    answer = driver.answers.popleft()
    short = StepResult(answer.step, answer.rows[:4], answer.tokens[:4])
    with pytest.raises(EngineError, match="missing"):
        driver.core.on_result(short, 0.0)


@pytest.mark.parametrize("token", [-1, -(2**31), 320, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_an_engine_error(token: int) -> None:
    driver = Driver()
    driver.submit(5)
    driver.plan()
    answer = driver.answers.popleft()
    with pytest.raises(EngineError, match="0..319"):
        driver.core.on_result(StepResult(answer.step, answer.rows, pack([token])), 0.0)


def test_blocks_of_generated_tokens_are_found_when_their_row_has_ended() -> None:
    """While it runs they are sealed a few at a time; its prompt is known at once."""
    driver = Driver()
    row = driver.submit(9, max_tokens=15)
    driver.run()
    again = driver.submit([*row.prompt, *row.tokens], max_tokens=2)
    driver.run()
    assert again.firsts[0].num_cached == 20, "all full blocks but the one whose last token was never computed"


def test_load_tells_tickets_and_never_loses_count() -> None:
    driver = Driver()
    driver.submit(4)
    driver.submit(400)  # refused, but its ticket is acknowledged
    load = driver.core.stats(2.0)
    assert load.admitted == {FRONT: 2}
    assert (load.num_waiting, load.num_running, load.waiting_tokens, load.finished) == (1, 0, 4, 1)
    assert load.oldest_wait_s == 2.0
    driver.plan()
    load = driver.core.stats(2.0)
    assert (load.num_waiting, load.num_running, load.running_tokens, load.blocks_used) == (0, 1, 4, 1)
    driver.run()
    load = driver.core.stats(3.0)
    assert (load.num_waiting, load.num_running, load.blocks_used, load.finished) == (0, 0, 0, 2)
    assert load.progress == driver.core.counters.steps


def test_totals_balance_when_quiet() -> None:
    driver = Driver(make_limits(max_waiting=5), fake=FakeOptions(eos_every=5, row_fault_token=300))
    rows = [driver.submit(3 + i, eos_token_ids=(257,)) for i in range(5)]
    rows += [driver.submit(3), driver.submit([300])]
    driver.step()
    driver.abort(rows[0])
    driver.run()
    totals = driver.core.counters
    assert totals.submitted == 7
    assert totals.submitted == totals.stop + totals.length + totals.abort + totals.error
    assert all(row.ends for row in rows)


def test_broken_books_are_found_by_both_audits() -> None:
    def damage_pool(core: EngineCore) -> None:
        core.scheduler.cache.pool.free.pop()

    def damage_counts(core: EngineCore) -> None:
        core.scheduler.cache.pool.counts[3] += 1

    def damage_slots(core: EngineCore) -> None:
        core.scheduler.free_rows.pop()

    def damage_index(core: EngineCore) -> None:
        core.scheduler.cache.pool.index[b"nothing"] = 0

    def damage_totals(core: EngineCore) -> None:
        core.counters.stop += 1

    for damage in (damage_pool, damage_counts, damage_slots, damage_index, damage_totals):
        driver = Driver()
        driver.submit(9)
        driver.run()
        driver.core.check_idle()
        damage(driver.core)
        with pytest.raises(EngineError):
            driver.core.check_idle()
        with pytest.raises(EngineError):
            driver.core.audit()


def test_core_is_torch_free() -> None:
    import subprocess
    import sys

    code = "import sys, trireme.engine_core.core, trireme.workers.fake; assert not {'torch', 'zmq'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_policy_is_named() -> None:
    from trireme.errors import ConfigError

    with pytest.raises(ConfigError, match="fcfs"):
        EngineCore(make_limits(), policy="fastest")

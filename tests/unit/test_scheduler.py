"""Events to plans: budget, chunks, blocks, preemption, several plans in flight. Blocks of 4 tokens throughout."""

from __future__ import annotations

import pytest

from tests.unit.engine_driver import Driver, Row, make_limits
from trireme.engine_core.scheduling.request import State
from trireme.transport.wire.columns import pack, unpack, unpack_flags
from trireme.transport.wire.messages import StepPlan


def planned(plan: StepPlan | None) -> dict[int, tuple[int, int, bool]]:
    """row -> (tokens computed before, tokens of this step, samples)."""
    assert plan is not None
    counts = (unpack(column).tolist() for column in (plan.rows, plan.num_computed, plan.num_tokens))
    columns = zip(*counts, unpack_flags(plan.sample).tolist(), strict=True)
    return {row: (computed, count, sample) for row, computed, count, sample in columns}


def test_prefill_and_decode_share_one_budget_and_decode_goes_first() -> None:
    driver = Driver(make_limits(max_num_tokens=10, chunk=10))
    driver.submit(6)
    assert planned(driver.plan()) == {0: (0, 6, True)}
    driver.answer()
    driver.submit(20)
    assert planned(driver.plan()) == {0: (6, 1, True), 1: (0, 9, False)}
    driver.answer()
    assert planned(driver.plan()) == {0: (7, 1, True), 1: (9, 9, False)}
    driver.answer()
    assert planned(driver.plan()) == {0: (8, 1, True), 1: (18, 2, True)}


def test_chunk_zero_does_not_cut_prompts() -> None:
    driver = Driver(make_limits(max_num_tokens=10, chunk=0))
    driver.submit(6)
    driver.submit(7)
    driver.submit(2)
    assert planned(driver.plan()) == {0: (0, 6, True)}
    driver.answer()
    assert planned(driver.plan()) == {0: (6, 1, True), 1: (0, 7, True), 2: (0, 2, True)}


def test_plans_are_deltas() -> None:
    driver = Driver(make_limits(chunk=3))
    row = driver.submit(7, max_tokens=4)
    first, second, third, fourth = (driver.step() and driver.plans[-1] for _ in range(4))
    assert [len(plan.new) for plan in driver.plans] == [1, 0, 0, 0]
    assert first.new[0].tokens.tolist() == row.prompt
    assert len(first.new[0].blocks) == 1
    assert second.grown_rows == pack([0])
    assert second.tokens == third.tokens == pack([-1]), "the workers know the prompt"
    assert unpack(fourth.tokens).tolist() == row.tokens[:1]
    driver.run()
    end = driver.submit(3, max_tokens=1)
    driver.plan()
    assert driver.plans[-1].freed == [0]
    assert driver.plans[-1].new[0].row == 0, "a freed slot may be taken in the same plan"
    driver.run()
    assert end.end.reason == "length"


def test_a_remainder_of_one_prompt_token_sends_no_token() -> None:
    driver = Driver(make_limits(chunk=3))
    driver.submit(4, max_tokens=2)
    driver.step()
    assert planned(driver.plan()) == {0: (3, 1, True)}
    assert driver.plans[-1].tokens == pack([-1])


def test_equal_prompts_in_one_step_are_computed_once() -> None:
    driver = Driver()
    rows = [driver.submit(18, temperature=1.0, seed=5, choice=choice) for choice in range(4)]
    plan = driver.plan()
    assert planned(plan) == {0: (0, 18, True), **dict.fromkeys((1, 2, 3), (16, 2, True))}
    driver.answer()
    assert [row.firsts[0].num_cached for row in rows] == [0, 16, 16, 16]
    driver.run()
    assert len({tuple(row.tokens) for row in rows}) == 4
    for row in rows:
        driver.check_tokens(row)


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    driver = Driver(make_limits(num_blocks=6, max_len=24))
    driver.submit(9)
    driver.submit(16)
    driver.submit(3)
    assert list(planned(driver.plan())) == [0]


def test_admission_counts_what_half_filled_rows_still_lack() -> None:
    driver = Driver(make_limits(num_blocks=6, max_len=24, max_num_tokens=5, chunk=4))
    driver.submit(16, max_tokens=1)
    driver.submit(10, max_tokens=1)
    driver.submit(5, max_tokens=1)
    seen = []
    while driver.step():
        seen.append(driver.core.scheduler.num_running)
    assert seen[0] == 1, "4 of 6 blocks are spoken for: 3 more would not fit"
    assert driver.core.scheduler.num_preemptions == 0


def test_preemption_takes_the_row_with_least_work_and_keeps_its_turn() -> None:
    driver = Driver(make_limits(num_blocks=8, max_len=32))
    old, young = driver.submit(9, max_tokens=20), driver.submit(13, max_tokens=12)
    late = driver.submit(3, max_tokens=2)
    while driver.core.scheduler.num_preemptions == 0:
        assert driver.step()
        driver.plan()
    victims = [row for row in driver.core.requests.values() if row.state is State.PREEMPTED]
    assert [len(row.tokens) - row.num_prompt for row in victims] == [len(old.tokens)]
    assert driver.core.scheduler.waiting.peek() is victims[0]
    driver.run()
    for row in (old, young, late):
        driver.check_tokens(row)
    assert old.end.num_preemptions >= 1


@pytest.mark.parametrize("policy", ["fcfs", "priority", "deadline"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_row_goes_before_what_came_after_it(policy: str, ahead: bool) -> None:
    driver = Driver(make_limits(num_blocks=8, max_len=32, max_num_seqs=2), policy=policy, ahead=ahead)
    first = [driver.submit(9, max_tokens=20), driver.submit(13, max_tokens=12)]
    driver.step()
    driver.now += 1.0
    late = [driver.submit(3, max_tokens=2) for _ in range(3)]
    while driver.core.scheduler.num_preemptions == 0:
        assert driver.step()
        driver.plan()
    (victim,) = [row for row in driver.core.requests.values() if row.state is State.PREEMPTED]
    assert driver.core.scheduler.waiting.peek() is victim
    others = [row for row in driver.core.scheduler.waiting if row is not victim]
    assert len(others) == len(late)
    assert victim.arrival < min(row.arrival for row in others)
    driver.run()
    for row in (*first, *late):
        driver.check_tokens(row)


def test_a_preempted_row_does_not_come_back_into_the_same_shortage() -> None:
    driver = Driver(make_limits(num_blocks=12, max_len=44))
    rows = [driver.submit(4 + i, max_tokens=30) for i in range(3)]
    driver.run()
    for row in rows:
        driver.check_tokens(row)
    assert 0 < driver.core.scheduler.num_preemptions <= 4


def test_plans_in_flight_hold_different_rows() -> None:
    driver = Driver(depth=2)
    rows = [driver.submit(4 + i) for i in range(4)]
    driver.plan()
    assert driver.plan() is None, "all four are waiting for their first token"
    driver.answer()
    first, second = planned(driver.plan()), planned(driver.plan())
    assert len(first) == len(second) == 2
    assert not first.keys() & second.keys()
    driver.run()
    for row in rows:
        driver.check_tokens(row)


def test_chunks_of_one_prompt_follow_each_other_through_the_pipeline() -> None:
    driver = Driver(make_limits(chunk=4), depth=3)
    driver.submit(11)
    assert planned(driver.plan()) == {0: (0, 4, False)}
    assert planned(driver.plan()) == {0: (4, 4, False)}
    assert planned(driver.plan()) == {0: (8, 3, True)}
    assert driver.plan() is None


def test_blocks_of_a_step_in_flight_are_fenced_until_its_answer() -> None:
    driver = Driver(make_limits(prefix_cache=False))
    row = driver.submit(9)
    driver.plan()
    driver.abort(row)
    counts = driver.core.audit()
    assert (counts.num_fenced, counts.num_free) == (3, 61)
    driver.answer()
    counts = driver.core.audit()
    assert (counts.num_fenced, counts.num_free) == (0, 64)


def test_stale_hits_are_not_counted_as_room() -> None:
    """Blocks of the own prefix are available only as long as nobody takes them."""
    driver = Driver(make_limits(num_blocks=6, max_len=24))
    driver.submit(20, max_tokens=1)
    driver.run()
    driver.submit([1, 2, 3], max_tokens=4)
    again = driver.submit(20, max_tokens=4)
    driver.run()
    driver.check_tokens(again)


# ---------------------------------------------------------------- cases named after public reports


def test_o17_chunked_prefill_emits_nothing_before_the_first_real_token() -> None:
    driver = Driver(make_limits(max_len=1100, num_blocks=300, max_num_tokens=64, chunk=64))
    row = driver.submit(1000, max_tokens=1)
    for _ in range(15):
        driver.step()
        assert (row.tokens, row.firsts, row.ends) == ([], [], [])
    driver.step()
    assert len(row.tokens) == len(row.firsts) == len(row.ends) == 1


@pytest.mark.parametrize("budget", [3, 4, 5])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12, 16])
def test_o19_last_chunk_when_the_prompt_is_a_multiple_of_the_block_size(length: int, budget: int) -> None:
    num_blocks = -(-(length + 6) // 4)
    driver = Driver(make_limits(num_blocks=num_blocks, max_len=length + 6, max_num_tokens=budget, chunk=budget))
    row = driver.submit(length, max_tokens=6)
    (request,) = driver.core.requests.values()
    while not row.tokens:
        driver.step()
    assert len(request.table.blocks) == -(-length // 4)
    driver.plan()
    assert len(request.table.blocks) == length // 4 + 1, "the first decoded token has a slot"
    driver.run()
    driver.check_tokens(row)
    assert len(row.tokens) == 6


def test_o20_output_is_whole_after_preemption_by_recompute() -> None:
    driver = Driver(make_limits(num_blocks=6, max_len=20))
    rows: list[Row] = [driver.submit([i + 10 * j for i in range(8)], max_tokens=12, logprobs=0) for j in range(2)]
    driver.run()
    assert driver.core.scheduler.num_preemptions >= 1
    for row in rows:
        assert len(row.tokens) == 12
        driver.check_tokens(row)
        assert [scores.token_ids[0, 0] for scores in row.logprobs] == row.tokens


def test_o21_cancelled_rows_leave_nothing_behind() -> None:
    driver = Driver(make_limits(num_blocks=40, max_waiting=64))
    for burst in range(10):
        rows = [driver.submit(3 + i, max_tokens=500) for i in range(30)]
        for _ in range(burst):
            driver.plan()
            if burst % 2 and driver.answers:
                driver.answer()
        for row in rows:
            driver.abort(row)
        driver.run()
        assert all(row.end.reason == "abort" for row in rows)
        assert len(driver.core._deadlines) <= 64
    last = driver.submit(5)
    driver.run()
    driver.check_tokens(last)


# ---------------------------------------------------------------- short prompts behind a long one


def first_step(driver: Driver, row: Row, most: int = 200) -> int:
    """The number of steps until a row has its first token."""
    for number in range(1, most):
        assert driver.step()
        if row.tokens:
            return number
    raise AssertionError("no token")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_short_prompt_does_not_wait_for_all_of_a_long_one(ahead: bool) -> None:
    driver = Driver(make_limits(max_num_seqs=4, max_num_tokens=16, chunk=16, num_blocks=200, max_len=400), ahead=ahead)
    long = driver.submit(300, 2)
    driver.step()
    shorts = [driver.submit(3 + i % 2, 2) for i in range(3)]
    assert first_step(driver, shorts[0]) <= 3
    assert first_step(driver, shorts[-1]) <= 3
    assert not long.tokens
    driver.run()
    assert max(sum(unpack(plan.num_tokens)) for plan in driver.plans) == 16
    assert len(driver.plans) <= 300 // 16 + 6, "no step had room left over while prompts were waiting for it"
    for row in (long, *shorts):
        driver.check_tokens(row)


def test_a_long_prompt_gets_half_of_each_step_however_many_short_ones_come() -> None:
    driver = Driver(
        make_limits(max_num_seqs=3, max_num_tokens=16, chunk=16, num_blocks=200, max_len=400, max_waiting=99)
    )
    long = driver.submit(320, 1)
    steps = 0
    while not long.tokens:
        while len(driver.core.scheduler.waiting) < 8:
            driver.submit(4, 1)
        assert driver.step()
        steps += 1
    assert 320 // 16 < steps <= 2 * 320 // 16 + 2


@pytest.mark.parametrize("chunk", [16, 0])
def test_without_short_prompts_behind_it_a_long_one_has_the_whole_step(chunk: int) -> None:
    """And two long ones are computed one after the other, in order: side by side both would be late."""
    driver = Driver(
        make_limits(max_num_seqs=4, max_num_tokens=16 if chunk else 200, chunk=chunk, num_blocks=200, max_len=400)
    )
    first, second = driver.submit(160, 1), driver.submit(161, 1)
    order = []
    while driver.step():
        order += [row for row in (first, second) if row.tokens and row not in order]
    assert order == [first, second]
    sizes = [sum(unpack(plan.num_tokens)) for plan in driver.plans]
    assert sizes == ([16] * 20 + [1] if chunk else [160, 161])

"""How the scheduler sizes prompts: by time beside streams, by response ratio, and the refusals when targets are missed."""

from __future__ import annotations

from math import inf

import msgspec
import numpy as np
import pytest

from tests.replay.recorder import Recorder
from tests.sim.even_streams import CPU, Engine, Visit, check_random_loads, limits, run
from trireme.engine_core.events import plans_of
from trireme.engine_core.scheduling.chunk_budget import LEAST_TOKENS, ChunkBudget
from trireme.params import RowParams
from trireme.step_time import StepShape, StepTimeModel
from trireme.topology.lockstep import Ballot, agree
from trireme.transport.wire.codec import encode
from trireme.transport.wire.messages import Submit


def taught() -> StepTimeModel:
    """Knows a machine on which a step takes 10 ms and each token 1 ms."""
    model = StepTimeModel()
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256) * 20:
        model.observe(StepShape(tokens), 0.010 + 0.001 * tokens)
        model.observe(StepShape(1).plus(tokens, 0), 0.010 + 0.001 * (tokens + 1))
    return model


def test_prompts_get_the_time_that_streams_leave() -> None:
    budget = ChunkBudget(taught(), 512, 1.6)
    budget.open(StepShape(10, 0), 0.060)
    first = budget.room(500, 0)
    assert 30 <= first <= 40, "60 ms - 10 ms - 10 sequences x 1 ms"
    budget.take(first, 0)
    assert budget.room(500, 0) == 0


def test_without_a_target_prompts_fill_the_step() -> None:
    budget = ChunkBudget(taught(), 512, 1.6)
    budget.open(StepShape(10, 0), inf)
    assert budget.room(1000, 0) == 502
    budget.take(500, 0)
    assert budget.room(1000, 0) == 2


def test_prompts_always_get_on() -> None:
    budget = ChunkBudget(taught(), 512, 1.6)
    budget.open(StepShape(200, 0), 0.001)
    assert budget.bound_s == pytest.approx(1.6 * 0.210, rel=0.1)
    assert budget.room(500, 0) > 50, "a share of the time that decoding takes"
    budget.open(StepShape(1, 0), 0.001)
    assert budget.room(500, 0) == LEAST_TOKENS, "and a few tokens, whatever the target"
    assert budget.room(5, 0) == 5


def test_late_prompts_widen_the_bound() -> None:
    budget = ChunkBudget(taught(), 512, 1.6)
    budget.open(StepShape(10, 0), 0.060, late=2.0)
    assert budget.is_late
    assert 75 <= budget.room(500, 0) <= 100


def test_the_tightest_target_counts() -> None:
    engine = Engine(limits(512, 0.5), CPU, 0.0, 0)
    prompt = np.zeros(8, np.int32)
    for rid, target in enumerate((0.0, 0.030, inf)):
        engine.core.submit("front", Submit(rid, prompt, RowParams(50), itl_target_s=target), 0.0)
    engine.plan()
    scheduler = engine.core.scheduler
    scheduler._sort_rows()
    assert scheduler.tightest_target(scheduler.decode_batch) == 0.030


def test_a_soft_target_is_widened_while_many_wait() -> None:
    def bound_s(num_waiting: int, crowd: float) -> float:
        bounds = msgspec.structs.replace(limits(64, 0.050), most_crowd=crowd)
        engine = Engine(bounds, CPU, 0.0, 0)
        for rid in range(8):
            engine.core.submit("front", Submit(rid, np.full(4, rid, np.int32), RowParams(50)), 0.0)
        for _ in range(4):
            engine.plan()
            engine.now = engine.steps[0][0]
            engine.finish()
        for rid in range(100, 100 + num_waiting):
            engine.core.submit("front", Submit(rid, np.full(2000, rid, np.int32), RowParams(2)), engine.now)
        engine.plan()
        return engine.core.scheduler.in_flight[-1].bound_s

    assert bound_s(2, 2.5) == bound_s(16, 1.0) == 0.050
    assert bound_s(6, 2.5) == pytest.approx(0.050 * 2 * 6 / 8)
    assert bound_s(40, 2.5) == pytest.approx(0.125)


def test_lockstep_ranks_agree_on_the_tightest_target() -> None:
    ballots = [Ballot(1, 1, True, False, target_us=t) for t in (0, 50_000, 12_000)]
    assert agree(ballots).target_us == 12_000
    assert agree(ballots[:1]).target_us == 0


def test_lockstep_ranks_widen_their_target_alike() -> None:
    """By the rank whose prompts are latest, each of them, whatever it sees itself."""
    ballots = [Ballot(1, 1, True, False, target_us=12_000, late_permille=late) for late in (1000, 2500, 1200)]
    agreed = agree(ballots)
    assert agreed.late_permille == 2500
    bounds = set()
    for arrival in (0.0, 9.0):  # one rank's prompt has waited for ten seconds, the other's for one
        engine = Engine(limits(512, 0.030, ttft_target=2.0), CPU, 0.0, 0)
        engine.core.submit("front", Submit(0, np.zeros(8, np.int32), RowParams(50)), 0.0)
        while not len(engine.core.scheduler.decode_batch):
            engine.plan()
            engine.now = engine.steps[0][0]
            engine.finish()
        engine.core.submit("front", Submit(1, np.zeros(4000, np.int32), RowParams(5)), arrival)
        budget = engine.core.scheduler.budget
        budget.peers_target_s, budget.agreed_late = agreed.target_us / 1e6, agreed.late_permille / 1000
        while engine.steps:
            engine.now = engine.steps[0][0]
            engine.finish()
        engine.now = 10.0
        engine.plan()
        bounds.add(round(budget.late * budget.target_s, 6))
    assert bounds == {0.030}, "2.5 x 12 ms"


def test_streams_keep_their_gaps_while_a_long_prompt_comes() -> None:
    visits = [Visit(0.0, 16, 200) for _ in range(4)] + [Visit(1.0, 4000, 4)]
    uneven = run(visits, limits(2048), CPU, noise=0.0)
    even = run(visits, limits(2048, 0.06), CPU, noise=0.0)
    assert max(gap for outcome in uneven.outcomes[:4] for gap in outcome.gaps) > 1.0
    assert max(gap for outcome in even.outcomes[:4] for gap in outcome.gaps) <= 0.075
    assert even.outcomes[4].first_s <= 1.6 * uneven.outcomes[4].first_s


def test_a_short_prompt_is_not_held_behind_long_ones() -> None:
    visits = [Visit(0.0, 4000, 4), Visit(0.001, 4000, 4), Visit(0.002, 4000, 4), Visit(0.1, 5, 20)]
    for policy in ("fcfs", "fair", "feedback"):
        found = run(visits, limits(256, 0.06), CPU, noise=0.0, policy=policy)
        assert found.outcomes[3].first_s < 1.0, policy
        assert max(outcome.first_s for outcome in found.outcomes) < 12000 * 0.0016, policy


def test_a_long_prompt_is_not_starved_by_short_ones() -> None:
    visits = [Visit(0.0, 6000, 4)] + [Visit(0.1 * i, 64, 4) for i in range(400)]
    found = run(visits, limits(256, 0.06), CPU, noise=0.0)
    assert found.outcomes[0].first_s < 20.0


def test_the_same_events_give_the_same_steps() -> None:
    """What a core chooses follows from what it has seen: a recording replays to the same plans, targets included."""
    engine = Engine(limits(512, 0.03, ttft_target=0.5), CPU, 0.05, 7)
    recorder = Recorder(engine.core)
    engine.core = recorder  # type: ignore[assignment]
    plans: list[bytes] = []
    for rid in range(30):
        prompt = np.full(20 + 37 * (rid % 9), rid, np.int32)
        recorder.submit("front", Submit(rid, prompt, RowParams(20), itl_target_s=0.02 * (rid % 3)), engine.now)
        for _ in range(4):
            planned = len(engine.steps)
            engine.plan()
            plans += [bytes(encode(step[3])[0]) for step in engine.steps[planned:]]
            engine.now = engine.steps[0][0] if engine.steps else engine.now
            if engine.steps:
                engine.finish()
    assert len(plans) > 80
    assert engine.bounded > 10
    assert plans_of(recorder.events) == plans


def test_random_loads_keep_their_bounds() -> None:
    bounded, kept = check_random_loads(60)
    assert bounded > 500
    assert kept >= 0.99 * bounded


def test_requests_are_refused_when_both_targets_are_missed() -> None:
    engine = Engine(limits(256, 0.05, ttft_target=0.5), CPU, 0.0, 0)
    core = engine.core
    for rid in range(40):
        prompt = np.full(1000, rid, np.int32)
        core.submit("front", Submit(rid, prompt, RowParams(400), deadline_s=60.0), engine.now)
    ends = []
    for rid in range(100, 200):
        for _ in range(3):
            engine.plan()
            engine.now = engine.steps[0][0]
            engine.finish()
        core.submit("front", Submit(rid, np.full(10, rid, np.int32), RowParams(4), deadline_s=60.0), engine.now)
        ends += [end for outputs in core.take_outputs().values() for end in outputs.ends if end.reason == "error"]
    assert ends
    assert {end.error_code for end in ends} == {"latency_targets_missed"}
    assert all(1.0 <= end.retry_after_s <= 60.0 for end in ends)
    assert "target of 500 ms" in ends[0].error

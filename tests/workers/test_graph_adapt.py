"""What is captured changes while a GPU's step loop serves (here on the CPU): tokens stay, and ranks that see the same plans and
orders do the same, whatever each of them measures and however late its answers come."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.planner import Job, RandomPlanner, job_of
from tests.models.rows import new_row, plan_of
from tests.workers.adapting import IDLE, MOST_BYTES, adaptation_of, captured_by, hurry, tight_policies
from tests.workers.device_twin import VOCAB
from tests.workers.test_gpu_runner import BLOCK, CPU, NUM_ROWS, alone, is_plain, make_runner
from trireme.engine_core.lifecycle.graph_capture import QUIET_S, Captures
from trireme.models.forward import HostKV
from trireme.params import RowParams
from trireme.transport.wire.messages import StepPlan, StepResult
from trireme.workers.cuda.graph_policy import Size
from trireme.workers.cuda.graph_sizes import fixed
from trireme.workers.cuda.graphs import GraphMemory, GraphSet
from trireme.workers.cuda.staging import Answer


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


class Ranks:
    """Runners that get the same plans, and an engine that orders changes at random moments."""

    def __init__(self, rng: random.Random, patch: pytest.MonkeyPatch, *, keeps: bool) -> None:
        self._rng, self.num_done, self._now, self._steps = rng, 0, 0.0, 0
        made = [make_runner(keeps=keeps, policies=tight_policies()) for _ in range(2)]
        self.runners = [runner for runner, _ in made]
        self.kv: list[HostKV] = [layer for _, kv in made for layer in kv]
        self.adaptations = [adaptation_of(runner) for runner in self.runners]
        self.keeps_tokens, self.max_logits = keeps, self.runners[0].max_logits
        self._captures = Captures(self._order)
        patch.setattr(Answer, "has_come", lambda answer: rng.random() < 0.5)

    def execute(self, plan: StepPlan) -> StepResult:
        mine, theirs = (runner.execute(plan) for runner in self.runners)
        assert (mine.rows, mine.tokens) == (theirs.rows, theirs.tokens)
        self._steps += 1
        if self._rng.random() < 0.5:
            self._now += 2 * QUIET_S
            for passed in (0.0, QUIET_S):
                self._captures.look(self._now + passed, self._steps, is_idle=True)
        if self._rng.random() < 0.2:
            known = {**IDLE, "held": 20, "growth": 3, "capture_s": 0.001, "row_s": self._rng.choice([0.0, 1e-4, 1.0])}
            self._found([each.adapt(known, is_idle=False) for each in self.adaptations])
        return mine

    def _order(self, args: dict[str, Any]) -> None:
        """Each rank measures something else, now and then that there is no memory left."""
        for adaptation in self.adaptations:
            adaptation._memory.held = self._rng.choice([10, 20, 30, MOST_BYTES + self._rng.randint(1, 9)])
            adaptation._memory.note(self._rng.random(), 0, is_largest=False)
        found = [each.adapt(args["known"], is_idle=args["is_idle"]) for each in self.adaptations]
        self._found(found)
        self._captures.answered(found, "")

    def _found(self, found: list[dict[str, Any]]) -> None:
        assert found[0]["done"] == found[1]["done"]
        first, second = (captured_by(runner) for runner in self.runners)
        assert first == second
        self.num_done += found[0]["done"].startswith(("add", "drop"))


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(job_of(VOCAB), job_of(VOCAB).map(is_plain)), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_ranks_change_alike_and_tokens_stay(jobs: list[Any], seed: int, keeps: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(random.Random(seed), patch, keeps=keeps)
        together = [Job(*job) for job in jobs]
        planner = RandomPlanner(
            random.Random(seed),
            together,
            cast(Any, ranks),
            ranks.kv,
            num_rows=NUM_ROWS,
            block_size=BLOCK,
            tolerance=0.0,
        )
        planner.run()
    for mine, job in zip(together, jobs, strict=True):
        theirs = alone(job)
        assert mine.outputs == theirs.outputs
        assert mine.scores == theirs.scores


def test_changes_do_happen_at_random() -> None:
    """Else the test above would show nothing."""
    jobs = [([5, 6, 7], RowParams(24)), ([9] * 11, RowParams(24)), ([1], RowParams(24))]
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(random.Random(3), patch, keeps=True)
        together = [Job(*job) for job in jobs]
        planner = RandomPlanner(
            random.Random(3), together, cast(Any, ranks), ranks.kv, num_rows=NUM_ROWS, block_size=BLOCK, tolerance=0.0
        )
        planner.run()
    assert ranks.num_done > 5
    assert [job.outputs for job in together] == [alone(job).outputs for job in jobs]


def test_steps_go_to_a_size_from_when_it_is_there() -> None:
    runner, _ = make_runner(policies=(tight_policies()[0], fixed(())))
    adaptation = adaptation_of(runner)
    assert adaptation.adapt(None, is_idle=False)["done"] == "measured"
    assert adaptation.adapt(IDLE, is_idle=True)["done"] == ""
    jobs = [([5, 6], RowParams(9)), ([7], RowParams(9)), ([8, 9], RowParams(9))]
    new = [new_row(row, prompt, params, blocks=[row, 10 + row, 20 + row]) for row, (prompt, params) in enumerate(jobs)]
    found = [runner.execute(plan_of(new=new, rows=[0, 1, 2], num_tokens=[2, 1, 2]))]
    for i in range(8):
        if i == 4:
            before = adaptation.report()
            assert (before["captured"], before["replays"], before["padded"]) == (2, 4, 4)
            assert adaptation.adapt(IDLE, is_idle=True)["done"] == "add 3"
        computed = [2 + i, 1 + i, 2 + i]
        found.append(runner.execute(plan_of(step=2 + i, rows=[0, 1, 2], num_computed=computed, tokens=[-1] * 3)))
    after = adaptation.report()
    assert (after["captured"], after["dropped"], after["replays"], after["padded"]) == (3, 0, 8, 4)
    for row, job in enumerate(jobs):
        tokens = [int.from_bytes(each.tokens[4 * row : 4 * row + 4], "little") for each in found]
        assert tokens == alone(job).outputs


def test_while_requests_wait_a_change_must_pay() -> None:
    runner, _ = make_runner(policies=(tight_policies()[0], fixed(())))
    adaptation = adaptation_of(runner)
    adaptation.adapt(None, is_idle=True)
    for _ in range(10):
        runner._graphs.set.policy.note((3,))  # of which each would save a row
    for row_s in (0.0, 0.002):
        assert adaptation.adapt({**IDLE, "row_s": row_s}, is_idle=False)["done"] == ""
    assert adaptation.adapt({**IDLE, "row_s": 0.0023}, is_idle=False)["done"] == "add 3"


def test_what_another_worker_has_no_memory_for_is_not_captured() -> None:
    runner, _ = make_runner(policies=(tight_policies()[0], fixed(())))
    adaptation = adaptation_of(runner)
    adaptation.adapt(None, is_idle=True)
    for _ in range(10):
        runner._graphs.set.policy.note((3,))
    assert adaptation.adapt({**IDLE, "held": MOST_BYTES}, is_idle=True)["done"] == ""
    assert adaptation.adapt({**IDLE, "held": MOST_BYTES - 1}, is_idle=True)["done"] == "add 3"
    assert adaptation.adapt({**IDLE, "held": MOST_BYTES + 1}, is_idle=True)["done"] == "drop 3"
    assert captured_by(runner) == [[(1,), (4,)], []]


@pytest.mark.parametrize("is_alone", [True, False])
def test_memory_that_runs_out_in_a_capture(is_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone the worker goes on as before and tries no more; others would wait for it, so that it must end."""
    runner, _ = make_runner(policies=(tight_policies()[0], fixed(())))
    adaptation = adaptation_of(runner, is_alone=is_alone)
    adaptation.adapt(None, is_idle=True)
    for _ in range(10):
        runner._graphs.set.policy.note((3,))

    def fails(size: Size) -> Any:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(runner._graphs.set, "_make", fails)
    if not is_alone:
        with pytest.raises(torch.OutOfMemoryError):
            adaptation.adapt(IDLE, is_idle=True)
        return
    report = adaptation.adapt(IDLE, is_idle=True)
    assert report["done"] == "no memory for 3"
    assert captured_by(runner) == [[(1,), (4,)], []]
    assert adaptation.adapt({**IDLE, "growth": report["growth"]}, is_idle=True)["done"] == ""


@pytest.mark.parametrize(
    ("most_bytes", "expected"),
    [(1000, [16, 8, 4, 2, 1]), (110, [16, 8, 4, 1]), (40, [16, 8, 1])],
)
def test_a_start_leaves_out_what_there_is_no_memory_for(most_bytes: int, expected: list[int]) -> None:
    """The largest takes 100 bytes, each other one 10; a quarter of the bound is theirs in any case."""
    memory = GraphMemory(CPU, most_bytes)
    made: list[int] = []

    def make(size: Size) -> dict[int, Any]:
        made.append(size[0])
        memory.held += 10 if len(made) > 1 else 100
        return {0: lambda: None}

    reports: list[tuple[str, int, int]] = []
    graphs = GraphSet(fixed((size,) for size in (1, 2, 4, 8, 16)), memory, make)
    left_out = graphs.capture_all("graphs", lambda *report: reports.append(report), leaves_out=True)
    assert made == expected
    assert left_out == [(size,) for size in (16, 8, 4, 2, 1) if size not in expected]
    assert graphs.policy.captured == [(size,) for size in reversed(expected)]
    assert reports == [("graphs", done, 5) for done in range(6)]
    assert (graphs.num_captured, graphs.num_dropped) == (len(expected), 0)

"""The GPU's step loop on the CPU, over a model that every token matters to: any plan gives what the host's runner gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.planner import Job, RandomPlanner, job_of, run_alone
from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.workers.device_twin import VOCAB, TwinModel, sample_rows
from trireme.errors import EngineError
from trireme.models.arch.rope import POSITIONS, TableRows
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules
from trireme.models.cuda.host_adapter import HostModel
from trireme.models.forward import HostKV, SoloGroup
from trireme.params import RowParams
from trireme.topology.mesh import Mesh
from trireme.workers.batch import Batch
from trireme.workers.cpu.runner import Runner
from trireme.workers.cuda.device_state import DeviceRows
from trireme.workers.cuda.graph_policy import GraphPolicy
from trireme.workers.cuda.graph_sizes import fixed, mixed_sizes, sizes_up_to
from trireme.workers.cuda.graphs import DecodeGraphs, GraphMemory, MixedGraphs
from trireme.workers.cuda.runner import NOT_FINITE, GpuRunner
from trireme.workers.cuda.staging import Answer
from trireme.workers.cuda.steps import Steps, choose_splits
from trireme.workers.inputs import InputBuilder
from trireme.workers.kv.tensors import independent

NUM_BLOCKS, BLOCK, NUM_ROWS, MAX_LEN = 64, 4, 4, 64
KNOWN = 40  # tokens of a tokenizer that does not fill the model's vocabulary
CPU = torch.device("cpu")
torch.set_num_threads(1)


def host_runner(model: Any, kv: list[Any], *, keeps: bool, vocab_size: int = VOCAB) -> Runner:
    batch = Batch(NUM_ROWS, MAX_LEN, BLOCK, vocab_size, NUM_BLOCKS)
    inputs = InputBuilder(128, NUM_ROWS, MAX_LEN // BLOCK)
    host = cast(Any, HostModel(model, "cpu"))
    return Runner(host, kv, batch, inputs, Mesh(1, 1, 1), keeper=SoloGroup() if keeps else None)


def make_runner(
    *,
    keeps: bool = True,
    num_graphs: int = NUM_ROWS,
    rules: Rules = PIECES,
    sizes: Sequence[tuple[int, int]] = (),
    policies: tuple[GraphPolicy, GraphPolicy] | None = None,
    table_rows: TableRows = POSITIONS,
    vocab_size: int = VOCAB,
) -> tuple[GpuRunner, list[HostKV]]:
    """A runner, and its cache as arrays. `sizes` are those of graphs of small steps with prompts."""
    model = cast(Any, TwinModel(rules, table_rows))
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    slow = host_runner(model, kv, keeps=keeps, vocab_size=vocab_size)
    rows = DeviceRows(NUM_ROWS, slow._batch.blocks.shape[1], CPU)
    steps = Steps(model, kv, rows, sample_rows, max_tokens=16, device=CPU, vocab_size=vocab_size)
    memory = GraphMemory(CPU)
    policies = policies or (fixed((size,) for size in sizes_up_to(num_graphs)), fixed(sizes))
    graphs, mixed = DecodeGraphs(steps, policies[0], memory), MixedGraphs(steps, policies[1], memory)
    for each in (graphs, mixed):
        each.set.capture_all("graphs", lambda phase, done, total: None)
    return GpuRunner(steps, graphs, slow._batch, slow, mixed), [
        HostKV(layer.k.numpy(), layer.v.numpy()) for layer in kv
    ]


@pytest.fixture(autouse=True)
def copy_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies all blocks at once, as the kernel does."""

    def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
        sources, destinations = (set(column) for column in pairs.T.tolist())
        assert len(destinations) == len(pairs)
        assert not sources & destinations
        cache[pairs[:, 1].long()] = cache[pairs[:, 0].long()]

    monkeypatch.setattr(cuda_ops, "copy_blocks", copy_blocks)


def alone(job: tuple[list[int], RowParams], table_rows: TableRows = POSITIONS, *, vocab_size: int = VOCAB) -> Job:
    model = TwinModel(table_rows=table_rows)
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    return run_alone(host_runner(model, kv, keeps=True, vocab_size=vocab_size), range(9), *job)


def is_plain(job: tuple[list[int], RowParams]) -> tuple[list[int], RowParams]:
    prompt, params = job
    return prompt, RowParams(params.max_tokens, temperature=params.temperature, top_k=params.top_k, seed=params.seed)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(job_of(VOCAB), job_of(VOCAB).map(is_plain)), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from([1, 2, NUM_ROWS]),
    st.booleans(),
    st.sampled_from([PIECES, Rules(whole_from=4, packs_fresh=True), Rules(whole_from=2, whole_to=6)]),
    st.sampled_from([(), ((0, 8), (2, 4), (4, 40))]),
    st.sampled_from([0, 1, NUM_ROWS]),
    st.sampled_from([POSITIONS, TableRows(MAX_LEN, 6)]),
)
def test_any_plan_gives_what_the_host_gives(
    jobs: list[Any],
    seed: int,
    keeps: bool,
    num_graphs: int,
    are_late: bool,
    rules: Rules,
    sizes: tuple[tuple[int, int], ...],
    most_ruled: int,
    table_rows: TableRows,
) -> None:
    """With graphs for few rows or all, tokens kept or told again, answers that are seen at once or as late as can be, prompts that
    go any way, room for the rules of some rows, and prompts of more than 6 tokens that are rotated in another way."""
    with pytest.MonkeyPatch.context() as patch:
        if are_late:
            patch.setattr(Answer, "has_come", lambda self: False)
        runner, kv = make_runner(keeps=keeps, num_graphs=num_graphs, rules=rules, sizes=sizes, table_rows=table_rows)
        runner._rules.most = most_ruled
        together = [Job(*job) for job in jobs]
        planner = RandomPlanner(
            random.Random(seed), together, cast(Any, runner), kv, num_rows=NUM_ROWS, block_size=BLOCK, tolerance=0.0
        )
        planner.run()
    for mine, job in zip(together, jobs, strict=True):
        theirs = alone(job, table_rows)
        assert mine.outputs == theirs.outputs
        assert mine.scores == theirs.scores
        assert [a.logprobs.tobytes() for a in mine.logprobs] == [b.logprobs.tobytes() for b in theirs.logprobs]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(job_of(KNOWN), job_of(KNOWN).map(is_plain)), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([1, NUM_ROWS]),
    st.sampled_from([(), ((2, 4), (4, 40))]),
    st.sampled_from([0, NUM_ROWS]),
)
def test_tokens_beyond_a_smaller_vocabulary_are_not_sampled(
    jobs: list[Any], seed: int, num_graphs: int, sizes: tuple[tuple[int, int], ...], most_ruled: int
) -> None:
    """In steps with graphs and without, with rules on the device and on the host; the model's logits are as wide as ever."""
    runner, kv = make_runner(num_graphs=num_graphs, sizes=sizes, vocab_size=KNOWN)
    runner._rules.most = most_ruled
    together = [Job(*job) for job in jobs]
    planner = RandomPlanner(
        random.Random(seed), together, cast(Any, runner), kv, num_rows=NUM_ROWS, block_size=BLOCK, tolerance=0.0
    )
    planner.run()
    for mine, job in zip(together, jobs, strict=True):
        theirs = alone(job, vocab_size=KNOWN)
        assert mine.outputs == theirs.outputs
        assert all(token < KNOWN for token in mine.outputs)
        assert all((entry.token_ids < KNOWN).all() for entry in mine.logprobs)
        assert [a.logprobs.tobytes() for a in mine.logprobs] == [b.logprobs.tobytes() for b in theirs.logprobs]


def test_steps_launched_ahead_go_on_with_tokens_nobody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "has_come", lambda self: False)
    runner, _ = make_runner()
    params = RowParams(6)
    expected = alone(([5, 6, 7], params)).outputs
    tickets = [runner.launch(plan_of(new=[new_row(2, [5, 6, 7], params, blocks=[9, 4, 30])], rows=[2], num_tokens=[3]))]
    for i in range(5):
        tickets.append(runner.launch(plan_of(step=2 + i, rows=[2], num_computed=[3 + i], tokens=[-1])))
    assert [rows_and_tokens(ticket.result()) for ticket in tickets] == [([2], [token]) for token in expected]
    assert runner.num_slow == 0


def test_a_slot_that_changed_hands_does_not_get_the_tokens_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answer, "has_come", lambda self: False)
    runner, _ = make_runner()
    runner.launch(plan_of(new=[new_row(0, [5], RowParams(9), blocks=[1])], rows=[0]))
    penal = RowParams(3, repetition_penalty=1.5)
    plan = plan_of(step=2, freed=[0], new=[new_row(0, [8, 9], penal, blocks=[2])], rows=[0], num_tokens=[2])
    assert rows_and_tokens(runner.execute(plan))[1] == alone(([8, 9], penal)).outputs[:1]
    assert runner.num_slow == 0


def test_only_rows_that_ask_for_it_are_sampled_by_the_host() -> None:
    """Beside them the device goes on by itself, and all go on together."""
    runner, _ = make_runner()
    jobs = [
        ([5, 6], RowParams(4, temperature=1.0, seed=3, logprobs=0)),
        ([7, 8, 9], RowParams(4, repetition_penalty=1.4, logprobs=1, bad_token_ids=((1, 2, 3) * 3,))),
    ]
    expected = [alone(job) for job in jobs]
    blocks = ([3, 9], [5, 2])
    new = [new_row(row, prompt, params, blocks=blocks[row]) for row, (prompt, params) in enumerate(jobs)]
    found = [runner.execute(plan_of(new=new, rows=[0, 1], num_tokens=[2, 3]))]
    found += [
        runner.execute(plan_of(step=2 + i, rows=[0, 1], num_computed=[2 + i, 3 + i], tokens=[-1, -1])) for i in range(3)
    ]
    for row, job in enumerate(expected):
        assert [rows_and_tokens(result)[1][row] for result in found] == job.outputs
    assert [[entry.rid for entry in result.logprobs] for result in found] == [[1, 0]] * 4
    assert runner.num_slow == 0


def test_a_prompt_is_scored_the_slow_way() -> None:
    runner, _ = make_runner()
    params = RowParams(1, prompt_logprobs=0)
    runner.execute(plan_of(new=[new_row(0, [5, 6], params, blocks=[3])], rows=[0], num_tokens=[2]))
    assert runner.num_slow == 1


def test_logits_that_are_not_finite_end_their_row_alone() -> None:
    runner, kv = make_runner()
    rows = [new_row(0, [1, 2, 3, 4], RowParams(4), blocks=[3, 5]), new_row(1, [7, 7], RowParams(4), blocks=[6])]
    runner.execute(plan_of(new=rows, rows=[0, 1], num_tokens=[4, 2]))
    kv[0].k[3] = np.nan
    result = runner.execute(plan_of(step=2, rows=[0, 1], num_computed=[4, 2], tokens=[-1, -1]))
    assert [(fault.row, fault.error) for fault in result.faults] == [(0, NOT_FINITE)]
    assert rows_and_tokens(result)[0] == [1]


@pytest.mark.parametrize("scores", [False, True], ids=["launched", "waited for"])
def test_a_plans_copies_come_before_what_it_computes(monkeypatch: pytest.MonkeyPatch, scores: bool) -> None:
    """Row 1 begins with copies of what row 0 has written in the step under way, one of them by way of a third block. A row beside
    them that scores its prompt makes the step a slow one."""
    monkeypatch.setattr(Answer, "has_come", lambda self: False)
    runner, _ = make_runner()
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    expected = alone((prompt, RowParams(3))).outputs
    first = runner.launch(plan_of(new=[new_row(0, prompt, RowParams(3), blocks=[3, 8, 1])], rows=[0], num_tokens=[10]))
    new = [new_row(1, prompt, RowParams(3), blocks=[20, 21, 22])]
    new += [new_row(2, [5, 6], RowParams(3, prompt_logprobs=0), blocks=[30])] if scores else []
    rows = [0, 1, 2][: 1 + len(new)]
    second = runner.launch(
        plan_of(
            step=2,
            new=new,
            copies=[(3, 40), (8, 21), (40, 20), (1, 40)],
            rows=rows,
            num_tokens=[1, 2, 2][: len(rows)],
            num_computed=[10, 8, 0][: len(rows)],
        )
    )
    assert rows_and_tokens(first.result()) == ([0], expected[:1])
    found = dict(zip(*rows_and_tokens(second.result()), strict=True))
    assert (found[0], found[1]) == (expected[1], expected[0])
    assert runner.num_slow == int(scores)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_copies_in_batches_are_copies_one_after_the_other(copies: list[tuple[int, int]]) -> None:
    expected, found = [*range(10)], [*range(10)]
    for source, destination in copies:
        expected[destination] = expected[source]
    batches = independent(copies)
    for batch in batches:
        before = [*found]
        assert not {source for source, _ in batch} & {destination for _, destination in batch}
        for source, destination in reversed(batch):
            found[destination] = before[source]
    assert found == expected
    assert [pair for batch in batches for pair in batch] == [pair for pair in copies if pair[0] != pair[1]]


def test_a_row_that_cannot_be_placed_fails_alone() -> None:
    runner, _ = make_runner()
    rows = [new_row(0, [VOCAB], RowParams(4), blocks=[3]), new_row(1, [7], RowParams(4), blocks=[6])]
    result = runner.execute(plan_of(new=rows, rows=[0, 1]))
    assert [fault.row for fault in result.faults] == [0]
    assert rows_and_tokens(result)[0] == [1]


def test_a_plan_beyond_a_rows_blocks_is_refused() -> None:
    runner, _ = make_runner()
    runner.execute(plan_of(new=[new_row(0, [1, 2, 3, 4], RowParams(4), blocks=[3])], rows=[0], num_tokens=[4]))
    with pytest.raises(EngineError, match="blocks for 4"):
        runner.execute(plan_of(step=2, rows=[0], num_computed=[4], tokens=[-1]))


def test_graph_sizes_end_with_the_batch() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(3) == [1, 2, 3]
    assert sizes_up_to(64)[-3:] == [48, 56, 64]
    assert sizes_up_to(256)[-1] == 256
    assert len(sizes_up_to(256)) == 23
    assert sizes_up_to(4096)[-1] == 512


def test_small_steps_with_prompts_have_graphs_up_to_the_batch() -> None:
    assert mixed_sizes(256, 8192)[:3] == [(0, 32), (0, 128), (0, 192)]
    assert mixed_sizes(256, 8192)[7:9] == [(8, 32), (8, 120)]
    assert mixed_sizes(256, 8192)[-1] == (256, 256)
    assert mixed_sizes(4, 100) == [(0, 32), (4, 32)]


def test_a_small_step_is_padded_to_the_least_size_that_holds_it() -> None:
    runner, _ = make_runner(sizes=[(0, 4), (2, 4), (2, 16)])
    sizes: list[tuple[int, int]] = []
    graphs = runner._mixed_graphs
    assert graphs is not None
    graphs.set.launches = {
        size: {0: lambda size=size, launch=launches[0]: (sizes.append(size), launch())}
        for size, launches in graphs.set.launches.items()
    }
    first = new_row(0, [5, 6, 7], RowParams(4), blocks=[3, 8])
    second = new_row(1, [*range(1, 10)], RowParams(4), blocks=[9, 4, 30])
    assert rows_and_tokens(runner.execute(plan_of(new=[first], rows=[0], num_tokens=[3]))) == (
        [0],
        alone(([5, 6, 7], RowParams(4))).outputs[:1],
    )
    found = runner.execute(plan_of(step=2, new=[second], rows=[0, 1], num_tokens=[1, 9], num_computed=[3, 0]))
    expected = alone(([5, 6, 7], RowParams(4))).outputs[1:2] + alone(([*range(1, 10)], RowParams(4))).outputs[:1]
    assert rows_and_tokens(found) == ([0, 1], expected)
    assert sizes == [(0, 4), (2, 16)]


@pytest.mark.parametrize(
    ("rows", "longest", "expected"),
    [(1, 100, 4), (1, 4096, 32), (8, 4096, 8), (16, 100, 4), (64, 4096, 1), (256, 1, 1)],
)
def test_contexts_are_cut_to_fill_the_card(rows: int, longest: int, expected: int) -> None:
    assert choose_splits(rows, 8, longest) == expected

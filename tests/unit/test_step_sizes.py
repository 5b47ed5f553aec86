"""What steps with prompts are padded to: as the workers' graphs do it, and chunks that leave little padding."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.engine_core.scheduling.chunk_budget import ChunkBudget
from trireme.machine.graph_sizes import GraphSizes
from trireme.machine.step_sizes import MOST_CAPTURED, StepSizes, padded_decodes, prompt_tokens, usual_rows
from trireme.step_time import StepShape, StepTimeModel
from trireme.workers.cuda.graph_sizes import mixed_policy


@given(st.sampled_from([1, 5, 20, 64, 256]), st.integers(0, 256), st.integers(1, 700))
def test_a_step_is_padded_to_the_graph_that_covers_it(max_rows: int, rows: int, prompt: int) -> None:
    rows = min(rows, max_rows)
    size = mixed_policy(GraphSizes(adapts=True), max_rows, 16384).fit((rows, prompt))
    expected = rows + prompt if size is None else sum(size)
    assert StepSizes(padded_decodes(max_rows)).computed(rows, prompt) == expected


@given(st.integers(0, 300), st.integers(1, 5000))
def test_what_fills_tiles_is_not_padded(rows: int, prompt: int) -> None:
    sizes = StepSizes(padded_decodes(256))
    fewer, more = sizes.filling(rows, prompt)
    assert fewer <= prompt <= more
    padded = min((count for count in padded_decodes(256) if count >= rows), default=rows)
    for tokens in {fewer, more} - {0}:
        base = padded if padded + tokens <= MOST_CAPTURED else rows
        assert sizes.computed(rows, tokens) == base + tokens or tokens <= 32
    assert sizes.computed(rows, more) <= (sizes.computed(rows, prompt) // 128 + 2) * 128


def test_graphs_beside_many_sequences_hold_fewer_prompt_tokens() -> None:
    assert prompt_tokens(16) == [32, 112, 176, 240, 304, 368, 496]
    assert prompt_tokens(256) == [32, 64, 128, 256]
    assert padded_decodes(20) == (0, 8, 16, 20)


def test_usual_rows_end_with_the_step() -> None:
    assert usual_rows(300) == [128, 256]
    assert usual_rows(9000)[-3:] == [2048, 4096, 8192]
    assert usual_rows(0) == []


def budget_of(sizes: StepSizes) -> ChunkBudget:
    """Of a GPU that takes 5 ms and 20 us a token, padding included, as steps have taught it."""
    times = StepTimeModel(sizes)
    for tokens in [*range(16, 1200, 16)] * 5:
        shape = StepShape(16, 16).plus(tokens, 0)
        times.observe(shape, 0.005 + 0.00002 * sizes.computed(16, tokens))
        times.observe(StepShape(16, 16), 0.0053)
    return ChunkBudget(times, 16384, 1.0, sizes)


@pytest.mark.parametrize(("bound_ms", "expected"), [(9.0, 112), (11.0, 240), (13.0, 304), (40.0, 1520)])
def test_a_cut_chunk_fills_tiles(bound_ms: float, expected: int) -> None:
    budget = budget_of(StepSizes(padded_decodes(256)))
    budget.open(StepShape(16, 16), bound_ms / 1e3)
    assert budget.room(8192, 0) == expected


def test_a_prompt_that_fits_is_not_cut() -> None:
    budget = budget_of(StepSizes(padded_decodes(256)))
    budget.open(StepShape(16, 16), 0.012)
    assert budget.room(99, 0) == 99
    budget.take(99, 0)
    rest = budget.room(8192, 0)
    assert (16 + 99 + rest) % 64 == 0

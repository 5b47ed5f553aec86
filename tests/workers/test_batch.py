"""Step inputs against an index-by-index reference, the persistent batch's tables, and the worker's memory arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.rows import new_row, plan_of
from trireme.params import RowParams
from trireme.workers.batch import POISON, Batch
from trireme.workers.cpu.memory import MIB, MemoryFacts, kv_share, read_memory, usable_cores
from trireme.workers.inputs import InputBuilder, StepRows

MAX_LEN, NUM_BLOCKS = 40, 200


@st.composite
def scheduled_rows(draw: Any) -> tuple[int, list[tuple[list[int], int, int, int, bool, int]]]:
    """Block size and rows of (tokens, num_prompt, num_computed, num_tokens, sample, prompt_logprobs)."""
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.lists(st.integers(0, 99), min_size=1, max_size=MAX_LEN))
        computed = draw(st.integers(0, len(tokens) - 1))
        count = draw(st.one_of(st.just(1), st.integers(1, len(tokens) - computed)))
        sample = computed + count == len(tokens)
        rows.append(
            (tokens, draw(st.integers(1, len(tokens))), computed, count, sample, draw(st.sampled_from([-1, 0])))
        )
    return draw(st.sampled_from([1, 3, 8, 16])), rows


@settings(deadline=None)
@given(scheduled_rows(), st.randoms(use_true_random=False))
def test_inputs_equal_the_index_by_index_reference(case: tuple[int, list[Any]], rng: Any) -> None:
    block_size, rows = case
    slots = rng.sample(range(8), len(rows))
    ids = list(range(NUM_BLOCKS))
    rng.shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-len(tokens) // block_size))] for tokens, *_ in rows]
    batch = Batch(8, MAX_LEN, block_size, 100, NUM_BLOCKS, poison=True)
    params = [RowParams(5, choice=i, prompt_logprobs=row[5]) for i, row in enumerate(rows)]
    placed = [
        new_row(slot, row[0], params[i], num_prompt=row[1], blocks=tables[i])
        for i, (slot, row) in enumerate(zip(slots, rows, strict=True))
    ]
    batch.apply(plan_of(freed=range(8), new=placed))
    step = StepRows(
        np.array(slots),
        np.array([row[3] for row in rows], np.int32),
        np.array([row[2] for row in rows], np.int32),
        np.array([row[4] for row in rows]),
    )
    got, wanted = InputBuilder(4, 2, 2).build(batch, step)

    token_ids, positions, flat_slots, starts, sampled, scored = [], [], [], [0], [], []
    for (tokens, num_prompt, computed, count, sample, wants), table in zip(rows, tables, strict=True):
        for position in range(computed, computed + count):
            if wants >= 0 and position < num_prompt - 1:
                scored.append(len(token_ids))
            token_ids.append(tokens[position])
            positions.append(position)
            flat_slots.append(table[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
        if sample:
            sampled.append(len(token_ids) - 1)
    assert got.token_ids.tolist() == token_ids
    assert got.positions.tolist() == positions
    assert got.slots.tolist() == flat_slots
    assert got.query_start.tolist() == starts
    assert got.context_len.tolist() == [row[2] + row[3] for row in rows]
    assert got.logits_index.tolist() == sorted(sampled + scored)
    at = range(len(sampled)) if wanted.sampling_at is None else wanted.sampling_at
    assert [int(got.logits_index[i]) for i in at] == sampled
    assert [int(got.logits_index[at + i]) for _, _, n, at in wanted.prompt for i in range(n)] == scored
    assert wanted.sampling.tolist() == [slot for slot, row in zip(slots, rows, strict=True) if row[4]]
    assert sum(count for _, _, count, _ in wanted.prompt) == len(scored)
    assert got.choices.tolist() == list(range(len(rows)))
    assert got.num_prompt.tolist() == [row[1] for row in rows]
    width = max(-(-(row[2] + row[3]) // block_size) for row in rows)
    padded = [(table + [0] * width)[:width] for table in tables]
    assert got.block_table.tolist() == padded
    for tensor in (got.token_ids, got.positions, got.slots, got.query_start, got.context_len, got.block_table):
        assert tensor.dtype == np.int32
        assert tensor.flags.c_contiguous


def test_a_freed_row_is_poisoned_and_a_placed_one_is_clean() -> None:
    batch = Batch(2, MAX_LEN, 4, 100, NUM_BLOCKS, poison=True)
    rich = RowParams(5, logprobs=2, prompt_logprobs=1, min_tokens=3, choice=4, presence_penalty=1.0)
    batch.apply(plan_of(new=[new_row(0, [1] * 9, rich, num_prompt=4, blocks=[7, 8, 9])]))
    batch.apply(plan_of(freed=[0]))
    assert (batch.tokens[0] == POISON).all()
    assert (batch.blocks[0] == POISON).all()
    batch.apply(plan_of(new=[new_row(0, [2, 3], RowParams(5, temperature=0.0), blocks=[1])]))
    assert batch.row_tokens(0).tolist() == [2, 3]
    assert (batch.num_prompt[0], batch.num_blocks[0], batch.choice[0]) == (2, 1, 0)
    assert (batch.is_plain[0], batch.wants_prompt[0], batch.rules[0]) == (True, False, None)
    assert batch.num_rows() == 1


# ---------------------------------------------------------------- memory


def test_memory_of_a_worker_is_cut_to_its_control_group(tmp_path: Path) -> None:
    """Which groups count is tested in tests/unit/test_cgroups.py."""
    files = {
        "proc/meminfo": f"MemTotal: {8000 * 1024} kB\nMemAvailable: {6000 * 1024} kB\nHugePages_Total: 0\n",
        "proc/self/status": "Name:\tpython\nRssAnon:\t 2048 kB\nRssFile:\t 999 kB\nRssShmem:\t 1024 kB\n",
        "proc/self/cgroup": "0::/pod/box\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_memory(tmp_path) == MemoryFacts(8000 * MIB, 6000 * MIB, 3 * MIB)
    group = tmp_path / "sys/fs/cgroup/pod/box"
    group.mkdir(parents=True)
    (group.parent / "memory.max").write_text(f"{1000 * MIB}\n")
    (group / "memory.current").write_text("100\n")
    (group.parent / "memory.current").write_text(f"{500 * MIB}\n")
    assert read_memory(tmp_path) == MemoryFacts(1000 * MIB, 500 * MIB, 3 * MIB)


def test_memory_of_this_machine() -> None:
    facts = read_memory()
    assert 0 < facts.own < facts.total
    assert 0 < facts.available <= facts.total


def test_cores_are_cut_to_the_quota(tmp_path: Path) -> None:
    mask = usable_cores(tmp_path)
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("max 100000\n")
    assert usable_cores(tmp_path) == mask
    quota.write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 1


def test_workers_of_a_machine_never_promise_more_than_it_has() -> None:
    facts = MemoryFacts(16_000 * MIB, 15_000 * MIB, own=500 * MIB)
    one, four = kv_share(facts, 100 * MIB, 1, 1), kv_share(facts, 100 * MIB, 4, 1)
    assert 4 * (four + 600 * MIB) <= 16_000 * MIB
    assert four < one < 15_000 * MIB
    crowded = MemoryFacts(16_000 * MIB, 3_000 * MIB, own=500 * MIB)
    assert kv_share(crowded, 100 * MIB, 4, 1) < 1_400 * MIB
    assert kv_share(MemoryFacts(400 * MIB, 100 * MIB, 300 * MIB), 100 * MIB, 1, 1) == 0

"""Graphs that come and go while a GPU serves: tokens stay, memory stays within its bound, what a drop gives back is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.gpu.test_cuda_engine import GREEDY, LENGTH, PROMPTS, assert_same_up_to_ties, engine, tokens, write_model
from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.models.tiny import make_tiny
from trireme import LLM
from trireme.machine.memory_budget import GPU_GRAPHS
from trireme.params import RowParams
from trireme.transport.wire.messages import WorkerInit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NUM_ROWS, BLOCK = 40, 16  # captured at the start: 1, 2, 4, 8, 16, 32, 40
MANY = [*PROMPTS, *PROMPTS, PROMPTS[0], PROMPTS[1]]  # 20, of which 24 rows are computed once that size is there


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


# ---------------------------------------------------------------- a worker by itself


class Driven:
    """A worker whose plans are made here: 20 rows, all prompts in one step, then a token for each in every step."""

    def __init__(self, model: Path, **parallel: Any) -> None:
        from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
        from trireme.resolve import prepare
        from trireme.workers.cuda.worker import CudaWorker

        config = EngineConfig(
            model=ModelConfig(model=str(model), max_len=1024),
            cache=CacheConfig(block_size=BLOCK, kv_memory="256MiB"),
            parallel=ParallelConfig(device="cuda", **parallel),
            scheduler=SchedulerConfig(max_num_seqs=NUM_ROWS),
        )
        init = WorkerInit(msgspec.msgpack.encode(prepare(config).config), 0, 0)
        self.worker, self.step = CudaWorker(init, lambda phase, done, total: None), 0
        self.worker.load()
        self.worker.setup_kv(512)
        self.known: dict[str, float] = self.worker.call("adapt", {"known": None, "is_idle": True})

    def run(self) -> list[tuple[int, ...]]:
        """What each of MANY is answered, greedily."""
        width = -(-(max(map(len, MANY)) + LENGTH) // BLOCK)
        rows = list(range(len(MANY)))
        params = RowParams(LENGTH)
        new = [
            new_row(row, prompt, params, blocks=range(row * width, (row + 1) * width))
            for row, prompt in enumerate(MANY)
        ]
        found = [self._step(freed=rows if self.step else [], new=new, rows=rows, num_tokens=[*map(len, MANY)])]
        for i in range(LENGTH - 1):
            computed = [len(prompt) + i for prompt in MANY]
            found.append(self._step(rows=rows, num_computed=computed, tokens=[-1] * len(rows)))
        return [tuple(step[row] for step in found) for row in rows]

    def _step(self, **columns: Any) -> list[int]:
        self.step += 1
        result = self.worker.execute(plan_of(step=self.step, **columns))
        assert result is not None
        assert result.faults == []
        return rows_and_tokens(result)[1]

    def adapt(self, *, is_idle: bool = True, **known: float) -> str:
        """What was done."""
        found = self.worker.call("adapt", {"known": {**self.known, **known}, "is_idle": is_idle})
        self.known = found
        return str(found["done"])


@pytest.fixture
def driven(model: Path) -> Iterator[Driven]:
    driven = Driven(model)
    yield driven
    driven.worker.close()


def same(mine: list[tuple[int, ...]], theirs: list[tuple[int, ...]], model: Path) -> None:
    count = len(PROMPTS)
    for at in (0, count):
        assert_same_up_to_ties(model, mine[at : at + count], theirs[at : at + count])


def test_tokens_stay_when_sizes_come_and_go(driven: Driven, model: Path) -> None:
    assert driven.known["row_s"] >= 0
    assert 0 < driven.known["held"] <= driven.known["most_bytes"] == GPU_GRAPHS
    before = driven.run()
    for _ in range(3):
        same(driven.run(), before, model)
    padded = driven.known["padded"]
    held = driven.known["held"]
    assert driven.adapt() == "add 24"
    taken = driven.known["held"] - held
    assert taken <= 64 << 20, "it fits into the pool, but for what the driver holds"
    print(f"a size of 24 rows: {driven.known['capture_s'] * 1e3:.0f} ms, {taken} bytes")
    at_12 = driven.known["padded"] - padded
    same(driven.run(), before, model)
    driven.adapt()
    assert at_12 == 4 * 12 * (LENGTH - 1)
    assert driven.known["padded"] - padded - at_12 == 4 * (LENGTH - 1)
    free = torch.cuda.mem_get_info()[0]
    done = driven.adapt(held=2 * GPU_GRAPHS)  # as if another rank had used up all memory
    torch.cuda.synchronize()
    print(f"{done}: gave {torch.cuda.mem_get_info()[0] - free} bytes back")
    assert done.startswith("drop")
    same(driven.run(), before, model)


def test_a_drop_leaves_the_other_graphs_whole(driven: Driven, model: Path) -> None:
    """They share a pool: whatever one of them gives back, the others still compute in their memory."""
    before = driven.run()
    held = 10 * GPU_GRAPHS
    dropped = []
    while (done := driven.adapt(held=held)).startswith("drop"):
        dropped.append(done)
        held -= 1
        same(driven.run(), before, model)
    assert len(dropped) > 8
    captured = driven.worker._adaptation.report()["captured"]  # type: ignore[union-attr]
    for _ in range(3):
        driven.run()
    assert driven.adapt().startswith("add")
    assert driven.worker._adaptation.report()["captured"] == captured + 1  # type: ignore[union-attr]
    same(driven.run(), before, model)


def test_many_changes_take_no_more_memory(driven: Driven) -> None:
    """Thirty sizes captured and dropped in turn: what is held at the end is what was held after the first turn."""
    graphs = driven.worker._runner._graphs.set  # type: ignore[union-attr]
    memory = driven.worker._adaptation._memory  # type: ignore[union-attr]
    with torch.inference_mode():
        graphs.add((24,))
        graphs.drop((24,))
        first = memory.held
        for _ in range(30):
            graphs.add((24,))
            graphs.drop((24,))
    print(f"held {first} after one turn, {memory.held} after 31")
    assert memory.held - first < 32 << 20


def test_a_capture_waits_for_steps_under_way(driven: Driven, model: Path) -> None:
    """Ordered behind launched steps that nobody has waited for, as an engine that is busy does."""
    before = driven.run()
    for _ in range(3):
        driven.run()
    rows = list(range(len(MANY)))
    width = -(-(max(map(len, MANY)) + LENGTH) // BLOCK)
    new = [
        new_row(row, prompt, RowParams(LENGTH), blocks=range(row * width, (row + 1) * width))
        for row, prompt in enumerate(MANY)
    ]
    first = plan_of(step=1000, freed=rows, new=new, rows=rows, num_tokens=[*map(len, MANY)])
    tickets = [driven.worker.launch(first)]
    done = []
    for i in range(LENGTH - 1):
        computed = [len(prompt) + i for prompt in MANY]
        if i % 4 == 2:
            done.append(driven.adapt(is_idle=False, row_s=1.0))
        tickets.append(
            driven.worker.launch(plan_of(step=1001 + i, rows=rows, num_computed=computed, tokens=[-1] * len(rows)))
        )
    assert done[0] == "add 24"
    found = [rows_and_tokens(result)[1] for ticket in tickets if (result := ticket.result()) is not None]
    same([tuple(step[row] for step in found) for row in rows], before, model)


@pytest.mark.parametrize(("asked", "captured"), [("none", []), ("1,20", [(1,), (20,)])])
def test_named_sizes_are_all_there_is(model: Path, asked: str, captured: list[tuple[int]]) -> None:
    driven = Driven(model, graph_sizes=asked)
    try:
        found = driven.run()
        assert driven.worker._runner._graphs.set.policy.captured == captured  # type: ignore[union-attr]
        for _ in range(3):
            same(driven.run(), found, model)
        assert driven.adapt() == ""
        assert (driven.known["replays"] > 0) == bool(captured)
    finally:
        driven.worker.close()


# ---------------------------------------------------------------- the engine


def until_captured(llm: LLM, more_than: int) -> dict[str, Any]:
    """Statistics, once the engine has had its rest."""
    until = time.monotonic() + 20
    while (stats := llm.stats()).get("graphs_captured", 0) <= more_than and time.monotonic() < until:
        time.sleep(0.1)
    return stats


@pytest.mark.parametrize("shape", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_an_engine_captures_what_it_needs_between_requests(model: Path, shape: dict[str, int]) -> None:
    """On ranks that share a stage or a pipeline too. Stages spread the sequences over the steps in flight, so that twice as many
    make steps of the same size."""
    many = MANY * shape.get("pp", 1)
    crowded = bool(shape) and CARDS < 2
    with engine(model, max_num_seqs=NUM_ROWS, share_gpus=crowded, **shape) as llm:
        first = until_captured(llm, 0)
        before = [tokens(llm.generate(many, GREEDY)) for _ in range(5)]
        if first["graphs_captured"] == 0:
            assert crowded  # stages on one card meet through the host, which no graph can
            return
        after = until_captured(llm, first["graphs_captured"])
        assert after["graphs_captured"] > first["graphs_captured"]
        assert 0 < after["graph_bytes"] <= GPU_GRAPHS
        same(tokens(llm.generate(many, GREEDY)), before[0], model)
        again = llm.stats()
        assert again["graph_replays"] >= after["graph_replays"]


def test_ranks_with_unequal_heads_capture_together(tmp_path: Path) -> None:
    """The one with two of three heads cuts contexts less finely than the other, and has fewer graphs."""
    shape = {
        "hidden_size": 384,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    model = make_tiny(
        tmp_path, dtype="bfloat16", vocab_size=512, num_hidden_layers=2, max_position_embeddings=1024, **shape
    )
    with engine(model, max_num_seqs=NUM_ROWS, tp=2, share_gpus=CARDS < 2) as llm:
        answers = [tokens(llm.generate(MANY, GREEDY)) for _ in range(5)]
        assert until_captured(llm, 0)["graphs_captured"] > 0
        answers.append(tokens(llm.generate(MANY, GREEDY)))
    assert all(len(ids) == LENGTH for answer in answers for ids in answer)


def test_sizes_that_were_learned_outlive_a_sleep(model: Path) -> None:
    with engine(model, max_num_seqs=NUM_ROWS) as llm:
        first = until_captured(llm, 0)["graphs_captured"]
        before = [tokens(llm.generate(MANY, GREEDY)) for _ in range(5)][0]
        assert until_captured(llm, first)["graphs_captured"] > first
        llm.sleep(1)
        same(tokens(llm.generate(MANY, GREEDY)), before, model)
        assert until_captured(llm, first)["graphs_captured"] > first, "captured again with the others"

"""The real worker over a tiny Llama: facts it reports, and rows that are bit-identical whatever the plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.planner import Job, RandomPlanner, job_of, run_alone
from tests.models.tiny import make_tiny_llama
from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from trireme.errors import EngineError, ModelError
from trireme.transport.wire.messages import WorkerInit, WorkerLoaded
from trireme.workers.cpu.worker import CpuWorker, choose_pinning

NUM_BLOCKS, BLOCK, NUM_ROWS = 64, 4, 4
LLAMA_BLOCK_BYTES = 2 * 2 * 2 * 16 * BLOCK * 4  # k and v, layers, KV heads, head dim, tokens, float32


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def make_worker(model: Path | str, progress: Any = lambda phase, done, total: None, **cache: Any) -> CpuWorker:
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_len=64),
        cache=CacheConfig(block_size=BLOCK, **cache),
        parallel=ParallelConfig(threads=1),
    )
    return CpuWorker(WorkerInit(msgspec.msgpack.encode(config), 0, 0), progress)


@pytest.fixture(scope="module")
def worker(model_dir: Path) -> Iterator[CpuWorker]:
    worker = make_worker(model_dir)
    worker.load()
    worker.setup_kv(NUM_BLOCKS)
    yield worker
    worker.close()


def test_loading_reports_facts_and_decisions(model_dir: Path) -> None:
    ticks: list[tuple[str, int, int]] = []
    loaded = make_worker(model_dir, lambda *tick: ticks.append(tick)).load()
    assert isinstance(loaded, WorkerLoaded)
    assert (loaded.worker, loaded.vocab_size, loaded.block_bytes) == (0, 320, LLAMA_BLOCK_BYTES)
    assert loaded.free_bytes > 0
    assert ticks[-1][1] == ticks[-1][2]
    decided = {what: (value, because) for what, value, because in loaded.decisions}
    assert decided["threads"] == ("1", "--threads was given")
    assert decided["kv dtype"] == ("float32", "the weights are float32")
    assert decided["runtime"] == ("native, no torch", "all layers run in one native call")
    assert {"kernels", "attention"} <= set(decided)


def test_kv_dtype_is_what_was_asked(model_dir: Path) -> None:
    worker = make_worker(model_dir, kv_dtype="bfloat16")
    assert worker.load().block_bytes == LLAMA_BLOCK_BYTES // 2
    worker.setup_kv(2)
    assert worker._kv[0].k.dtype == np.uint16


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(job_of(320), min_size=1, max_size=5), st.integers(0, 2**32))
def test_any_plan_is_bit_identical_to_the_solo_run(worker: CpuWorker, jobs: list[Any], seed: int) -> None:
    """O20: tokens, sampled and prompt logprobs, over chunks, company, slots, scattered blocks and preemptions."""
    assert worker._runner is not None
    alone = [run_alone(worker._runner, range(9), *job) for job in jobs]
    together = [Job(*job) for job in jobs]
    planner = RandomPlanner(
        random.Random(seed), together, worker._runner, worker._kv, num_rows=NUM_ROWS, block_size=BLOCK, tolerance=0.0
    )
    planner.run()
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.outputs == theirs.outputs
        assert mine.scores == theirs.scores
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.logprobs.tobytes() == b.logprobs.tobytes()


def test_calls(worker: CpuWorker) -> None:
    info = worker.call("info", {})
    assert info["worker"] == 0
    assert info["own_bytes"] > 0
    worker.call("poison", {"blocks": [3]})
    assert np.isnan(worker._kv[1].v[3]).all()
    with pytest.raises(EngineError, match="no method 'dance'"):
        worker.call("dance", {})


def test_a_missing_model_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        make_worker(tmp_path / "nowhere").load()


@pytest.mark.parametrize(
    ("asked", "threads", "cores", "expected"),
    [
        ("auto", 2, 2, "off"),
        ("auto", 1, 2, "off"),
        ("auto", 12, 16, "on"),
        ("auto", 8, 16, "off"),
        ("auto", 4, 2, "off"),
    ]
    + [("on", 2, 2, "on"), ("on", 1, 16, "on"), ("on", 3, 2, "off"), ("off", 12, 16, "off")],
)
def test_threads_are_pinned_where_that_helps(asked: str, threads: int, cores: int, expected: str) -> None:
    """Not where every core computes, nor where a second deployment fits beside this one and would choose the same cores."""
    assert choose_pinning(asked, threads, cores).value == expected

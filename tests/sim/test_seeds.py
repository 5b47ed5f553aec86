"""Thousands of worlds, each decided by its seed: no promise is broken in any. Seeds that once broke one come first.

`python -m tests.sim.run --seed N` shows one of them line by line.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.sim.run import kept_seeds, pool_of, run_many, spare_processes
from tests.sim.world import run_seed
from trireme.coordinator.simulation.trace import Trace

ROOT = Path(__file__).resolve().parents[2]
NUM_SEEDS = 5000
PARTS = 10  # each within the time-out of a test, also on a processor that others use


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_seeds_that_once_failed() -> None:
    failed = [result for seed in kept_seeds() if (result := run_seed(seed)).breach]
    assert not failed


Pool = tuple[int, ProcessPoolExecutor | None]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Other processes of the suite, where it has some (xdist), run other parts meanwhile."""
    processes = spare_processes(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    with pool_of(processes) as found:
        yield processes, found


@pytest.mark.parametrize("part", range(PARTS))
def test_seeds(part: int, pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    began, count = time.perf_counter(), NUM_SEEDS // PARTS
    results = list(run_many(part * count, count, *pool))
    assert [result.seed for result in results] == list(range(part * count, (part + 1) * count))
    failed = [result for result in results if result.breach]
    with capsys.disabled():
        took = time.perf_counter() - began
        print(f"\n  {count} seeds in {took:.1f} s on {pool[0]} processes, {len(failed)} with a breach")
    assert not failed, "\n".join(f"python -m tests.sim.run --seed {r.seed}: {r.breach}" for r in failed)


def test_one_seed_is_one_run() -> None:
    """Whatever the order of hashes: the same trace, to the last line."""
    seeds = [3, 14, 159, 265, 358]
    code = "import sys, logging; logging.disable(50); from tests.sim.world import run_seed; "
    code += "from trireme.coordinator.simulation.trace import Trace; "
    code += "print([run_seed(int(seed), trace=Trace()).digest for seed in sys.argv[1:]])"
    told = [
        subprocess.run(
            [sys.executable, "-c", code, *map(str, seeds)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for number in ("1", "2")
    ]
    here = str([run_seed(seed, trace=Trace()).digest for seed in seeds])
    assert told == [here, here]

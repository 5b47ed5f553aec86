"""The native thread pool: every task exactly once, from several callers at once, after naps, and when resized."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trireme.errors import ConfigError
from trireme.models.native import load_native

NATIVE = load_native()


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = NATIVE.num_threads()
    yield
    NATIVE.set_num_threads(before)
    NATIVE.set_spin_us(60)


def count_tasks(num_tasks: int, rounds: int) -> np.ndarray:
    counts = np.zeros(num_tasks, np.int32)
    NATIVE.parallel_probe(counts, rounds)
    return counts


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("num_tasks", [0, 1, 2, 7, 100])
def test_every_task_runs_exactly_once(threads: int, num_tasks: int) -> None:
    NATIVE.set_num_threads(threads)
    assert (count_tasks(num_tasks, 300) == 300).all()


@pytest.mark.parametrize("spin_us", [0, 5, 200])
def test_sleeping_threads_wake_up(spin_us: int) -> None:
    """Calls spaced around the spinning time hit the moment of falling asleep."""
    NATIVE.set_num_threads(3)
    NATIVE.set_spin_us(spin_us)
    for pause_us in (0, 1, 5, 20, 60, 200, 1000):
        for _ in range(20):
            assert (count_tasks(5, 1) == 1).all()
            time.sleep(pause_us * 1e-6)


def test_concurrent_callers_do_not_meet() -> None:
    NATIVE.set_num_threads(3)
    results: list[np.ndarray] = []
    callers = [threading.Thread(target=lambda: results.append(count_tasks(9, 5000))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(results) == 4
    assert all((counts == 5000).all() for counts in results)


def test_resize_while_others_call() -> None:
    stop = threading.Event()
    wrong: list[np.ndarray] = []

    def call() -> None:
        while not stop.is_set():
            counts = count_tasks(6, 50)
            if not (counts == 50).all():
                wrong.append(counts)

    caller = threading.Thread(target=call)
    caller.start()
    for threads in (1, 4, 2, 3, 1, 2) * 3:
        NATIVE.set_num_threads(threads)
        time.sleep(0.002)
    stop.set()
    caller.join()
    assert not wrong


def test_idle_pool_uses_no_cpu() -> None:
    NATIVE.set_num_threads(4)
    count_tasks(16, 1)
    time.sleep(0.02)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1


def test_count_below_one_means_one() -> None:
    NATIVE.set_num_threads(0)
    assert NATIVE.num_threads() == 1


def test_unknown_and_missing_instruction_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown instruction set 'sse9'"):
        NATIVE.set_isa("sse9")
    for name in {"avx2", "avxvnni", "avx512vnni", "amx"} - set(NATIVE.isas()):
        with pytest.raises(ValueError, match=f"this machine has no {name}"):
            NATIVE.set_isa(name)
    best = NATIVE.best_isa()
    assert NATIVE.isa() == ("avx512vnni" if best == "amx" else best)


def test_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trireme.models._native", None)
    with pytest.raises(ConfigError, match="trireme.models._native") as caught:
        load_native()
    assert "setup.py build_ext --inplace" in caught.value.hint


def cores_of_threads() -> set[frozenset[int]]:
    """The cores that each thread of this process may use."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_stay_on_their_cores() -> None:
    """In a thread of its own, as a worker is: the rest of the process keeps all cores."""
    mine = sorted(os.sched_getaffinity(0))
    seen: list[set[frozenset[int]]] = []

    def work() -> None:
        NATIVE.set_num_threads(2)
        NATIVE.set_cores(mine[:2])
        until = time.monotonic() + 10
        while frozenset(mine[1:2]) not in cores_of_threads() and time.monotonic() < until:
            assert (count_tasks(9, 2000) == 2000).all()  # a thread moves when it starts, perhaps after the first calls
        seen.append(cores_of_threads())
        NATIVE.set_cores([])
        until = time.monotonic() + 10
        while len(cores_of_threads()) > 1 and time.monotonic() < until:
            assert (count_tasks(9, 2000) == 2000).all()
        seen.append(cores_of_threads())

    caller = threading.Thread(target=work)
    caller.start()
    caller.join()
    assert {frozenset(mine[:1]), frozenset(mine[1:2])} <= seen[0]
    assert seen[1] == {frozenset(mine)}


def test_a_core_that_is_not_ours_is_refused() -> None:
    with pytest.raises(RuntimeError, match="core 100000 is not ours"):
        NATIVE.set_cores([100000])

"""The in-process executor over a worker that launches steps: the next one starts while one runs, answers come in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.procs.engine_process import make_config, write_fake_model
from trireme.engine_core.executor.base import MODULES, WorkerPlace
from trireme.engine_core.executor.inproc import InprocExecutor
from trireme.params import RowParams
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.messages import StepResult
from trireme.workers.fake import FakeOptions, expected_tokens

PROMPT = [5, 6, 7]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[InprocExecutor, Poller]]]:
    monkeypatch.setitem(MODULES, "fake", "tests.procs.launching_worker")
    made: list[InprocExecutor] = []

    def make(**fake: Any) -> tuple[InprocExecutor, Poller]:
        poller = Poller()
        made.append(InprocExecutor(make_config(write_fake_model(tmp_path / "m", **fake)), WorkerPlace(0), poller))
        made[-1].load(lambda message: None)
        made[-1].setup_kv(64)
        return made[-1], poller

    yield make
    for executor in made:
        executor.close()


def wait_for(poller: Poller, true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        poller.wait(0.05)


def first_step(max_tokens: int = 8) -> Any:
    return plan_of(new=[new_row(0, PROMPT, RowParams(max_tokens), blocks=[1, 2])], rows=[0], num_tokens=[3])


def next_step(step: int) -> Any:
    return plan_of(step=step, rows=[0], num_computed=[1 + step], tokens=[-1])


def test_a_step_is_launched_while_the_one_before_it_runs(start: Any) -> None:
    executor, poller = start(delay_ms=300.0)
    assert executor.depth == 2
    started: list[int] = []
    executor.submit(first_step())
    executor.submit(next_step(2))
    executor.call("started", {}, lambda found, error: started.extend(found))
    results: list[StepResult] = []

    def look() -> bool:
        results.extend(executor.take_results())
        return bool(started)

    wait_for(poller, look)
    assert (started, results) == ([2], [])

    def all_there() -> bool:
        results.extend(executor.take_results())
        return len(results) == 2

    wait_for(poller, all_there)
    assert [result.step for result in results] == [1, 2]
    tokens = [rows_and_tokens(result)[1][0] for result in results]
    assert tokens == expected_tokens(PROMPT, RowParams(8), FakeOptions(), 2)


def test_an_error_of_a_launched_step_is_the_engines(start: Any) -> None:
    executor, poller = start(crash_token=7)
    executor.submit(first_step())

    with pytest.raises(RuntimeError, match="scripted crash in slot 0"):
        wait_for(poller, lambda: bool(executor.take_results()))


def test_it_closes_with_a_step_under_way(start: Any) -> None:
    executor, _ = start(delay_ms=100.0)
    executor.submit(first_step())
    executor.close()
    assert [result.step for result in executor.take_results()] == [1]

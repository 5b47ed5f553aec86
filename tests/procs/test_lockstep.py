"""Engines in lock step as real processes: they share a collective in every step, park, pause, die and come back together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.fake_llm import answer, expected, fake_model, prompt_of, until
from trireme import AsyncLLM
from trireme.errors import EngineError, OverloadedError

pytestmark = pytest.mark.timeout(120)

SMALL: dict[str, Any] = {"worker": "fake", "dp": 2, "ep": True, "max_len": 1024, "num_blocks": 512, "check": True}


@contextlib.asynccontextmanager
async def engines(directory: Path, executor: str = "inproc", **fake: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(fake_model(directory, **fake), **SMALL, executor=executor) as llm:
        yield llm


async def workers(llm: AsyncLLM) -> list[dict[str, Any]]:
    """What the worker of each engine says of itself."""
    client = llm._ready()[0]
    return [(await client.call(engine, "workers"))[0] for engine in range(2)]


async def parked(llm: AsyncLLM) -> list[dict[str, Any]]:
    """The workers, when both have made the same steps and make no more."""

    async def still() -> list[dict[str, Any]]:
        before = await workers(llm)
        await asyncio.sleep(0.1)
        after = await workers(llm)
        return after if before == after else []

    found: list[dict[str, Any]] = await until(still, "the engines park")
    assert found[0]["collectives"] == found[1]["collectives"]
    assert found[0]["trace"] == found[1]["trace"]
    return found


async def num_running(llm: AsyncLLM) -> int:
    return sum([(await llm.stats(engine))["num_running"] for engine in range(2)])


@pytest.mark.parametrize("executor", ["inproc", "procs"])
async def test_engines_step_together_and_park_together(tmp_path: Path, executor: str) -> None:
    """Prompts of many lengths come at many moments; every step is one of both engines, and all tokens are right."""
    async with engines(tmp_path, executor) as llm:
        assert [worker["collectives"] for worker in await parked(llm)] == [0, 0]
        for round_ in range(3):
            prompts = [prompt_of(3 + 29 * i % 200, 7 * i + round_) for i in range(9)]
            found = await asyncio.gather(*(answer(llm, prompt, 5 + 3 * i) for i, prompt in enumerate(prompts)))
            assert found == [expected(prompt, 5 + 3 * i) for i, prompt in enumerate(prompts)]
        busy = await parked(llm)
        assert busy[0]["collectives"] >= 29
        one = prompt_of(8, 1)
        assert await answer(llm, one, 6) == expected(one, 6)  # one engine has nothing to do, and steps along
        after = await parked(llm)
        assert 6 <= after[0]["collectives"] - busy[0]["collectives"] <= 6 + 4
        audits = [await llm._ready()[0].call(engine, "audit") for engine in range(2)]
        assert all(audit is not None for audit in audits)


async def test_a_pause_keeps_what_runs_and_what_waits(tmp_path: Path) -> None:
    async with engines(tmp_path, delay_ms=5) as llm:
        prompts = [prompt_of(40 + i, i) for i in range(6)]
        running = [asyncio.ensure_future(answer(llm, prompt, 60)) for prompt in prompts]
        await until(lambda: num_running(llm), "rows run")
        await llm.pause("keep")
        still = await parked(llm)
        assert not any(task.done() for task in running)
        late = [asyncio.ensure_future(answer(llm, prompt_of(5, i), 3)) for i in range(4)]
        await asyncio.sleep(0.3)
        assert await workers(llm) == still  # no step while paused, whatever comes
        assert [(await llm.stats(engine))["pause"] for engine in range(2)] == ["keep", "keep"]
        await llm.resume()
        assert await asyncio.gather(*running) == [expected(prompt, 60) for prompt in prompts]
        assert await asyncio.gather(*late) == [expected(prompt_of(5, i), 3) for i in range(4)]
        await parked(llm)


async def test_a_pause_waits_for_what_runs(tmp_path: Path) -> None:
    async with engines(tmp_path, delay_ms=5) as llm:
        prompts = [prompt_of(40 + i, i) for i in range(4)]
        running = [asyncio.ensure_future(answer(llm, prompt, 50)) for prompt in prompts]

        async def all_run() -> bool:
            return await num_running(llm) == len(prompts)

        await until(all_run, "every row runs: one that came after the pause would wait for its end")
        pausing = asyncio.ensure_future(llm.pause("wait"))
        await asyncio.sleep(0.05)
        late = asyncio.ensure_future(answer(llm, prompt_of(5, 9), 3))
        await pausing
        async with asyncio.timeout(5):  # the engines are done; their last tokens may still be on the way here
            assert await asyncio.gather(*running) == [expected(prompt, 50) for prompt in prompts]
        await asyncio.sleep(0.2)
        assert not late.done()
        await llm.resume()
        assert await late == expected(prompt_of(5, 9), 3)


async def test_a_pause_ends_what_runs(tmp_path: Path) -> None:
    async with engines(tmp_path, delay_ms=5) as llm:
        running = [asyncio.ensure_future(answer(llm, prompt_of(40 + i, i), 500)) for i in range(4)]
        await until(lambda: num_running(llm), "rows run")
        await llm.pause("abort")
        ends = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(end, OverloadedError) and "paused" in str(end) for end in ends), ends
        await llm.resume()
        assert await answer(llm, prompt_of(5, 1), 4) == expected(prompt_of(5, 1), 4)


async def test_pauses_of_two_clients_do_not_mix(tmp_path: Path) -> None:
    async with engines(tmp_path, delay_ms=5) as llm:
        running = asyncio.ensure_future(answer(llm, prompt_of(9, 2), 100))
        await until(lambda: num_running(llm), "a row runs")
        waiting = asyncio.ensure_future(llm.pause("wait"))
        await asyncio.sleep(0.05)
        await llm.pause("keep")
        with pytest.raises(EngineError, match="another pause or resume"):
            await waiting
        await parked(llm)
        assert not running.done()
        with pytest.raises(EngineError, match="no pause 'never'"):
            await llm.pause("never")
        await llm.resume()
        assert await running == expected(prompt_of(9, 2), 100)


async def test_the_death_of_one_ends_all_and_all_come_back(tmp_path: Path) -> None:
    """kill -9 in the middle of a wave: both engines start again, in a new life, and the requests go on there."""
    async with engines(tmp_path, delay_ms=5) as llm:
        prompts = [prompt_of(40 + i, i) for i in range(6)]
        running = [asyncio.ensure_future(answer(llm, prompt, 80)) for prompt in prompts]
        await until(lambda: num_running(llm), "rows run")
        before = await workers(llm)
        os.kill(before[1]["pid"], signal.SIGKILL)
        assert await asyncio.gather(*running) == [expected(prompt, 80) for prompt in prompts]
        after = await parked(llm)
        assert not {worker["pid"] for worker in before} & {worker["pid"] for worker in after}
        assert [state.epoch for state in llm.health()] == [1, 1]


async def test_a_parked_group_dies_together_and_stays_paused(tmp_path: Path) -> None:
    async with engines(tmp_path) as llm:
        await llm.pause("keep")
        before = await workers(llm)
        os.kill(before[0]["pid"], signal.SIGKILL)

        async def reborn() -> bool:
            return [state.epoch for state in llm.health() if state.is_up] == [1, 1]

        await until(reborn, "both engines are back")
        late = asyncio.ensure_future(answer(llm, prompt_of(5, 3), 4))
        await asyncio.sleep(0.5)
        assert not late.done()
        assert [worker["collectives"] for worker in await workers(llm)] == [0, 0]
        await llm.resume()
        assert await late == expected(prompt_of(5, 3), 4)


async def test_a_wave_goes_on_without_its_coordinator(tmp_path: Path) -> None:
    async with engines(tmp_path, delay_ms=5) as llm:
        running = [asyncio.ensure_future(answer(llm, prompt_of(9, i), 150)) for i in range(2)]
        await until(lambda: num_running(llm), "rows run")
        (coordinator,) = (part for part in llm._deployment._supervisor.parts if part.role == "coordinator")  # type: ignore[attr-defined]
        os.kill(coordinator.child.pid, signal.SIGKILL)
        assert await asyncio.gather(*running) == [expected(prompt_of(9, i), 150) for i in range(2)]
        assert await answer(llm, prompt_of(7, 4), 4) == expected(prompt_of(7, 4), 4)  # a new wave, by the new one
        await llm.pause("keep")
        await llm.resume()


def test_a_deployment_says_what_it_cannot_join() -> None:
    from trireme.errors import ConfigError

    with pytest.raises(ConfigError, match="--ep"):
        AsyncLLM("smollm2", dp=2, tp=2, ep=True)

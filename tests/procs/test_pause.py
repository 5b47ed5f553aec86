"""Pause and resume of engines that do not step together: the same promises, one engine or two, in this process or in others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.fake_llm import answer, expected, fake_model, prompt_of, until
from trireme import LLM, AsyncLLM, SamplingParams
from trireme.errors import EngineError, OverloadedError

pytestmark = pytest.mark.timeout(120)

SMALL: dict[str, Any] = {"worker": "fake", "max_len": 1024, "num_blocks": 512, "check": True}


@contextlib.asynccontextmanager
async def engines(directory: Path, dp: int) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(fake_model(directory, delay_ms=5), **SMALL, dp=dp) as llm:

        async def known() -> bool:
            loads = await llm._ready()[0].loads()
            return [load["state"] for load in loads.values()] == ["ready"] * dp

        await until(known, "the coordinator knows every engine")
        yield llm


async def steps(llm: AsyncLLM, dp: int) -> list[int]:
    return [(await llm.stats(engine))["steps"] for engine in range(dp)]


async def busy(llm: AsyncLLM, dp: int) -> bool:
    return all([(await llm.stats(engine))["num_running"] for engine in range(dp)])


async def runs_somewhere(llm: AsyncLLM, dp: int) -> bool:
    return any([(await llm.stats(engine))["num_running"] for engine in range(dp)])


@pytest.mark.parametrize("dp", [1, 2])
async def test_rows_are_kept_and_new_ones_wait(tmp_path: Path, dp: int) -> None:
    async with engines(tmp_path, dp) as llm:
        prompts = [prompt_of(40 + i, i) for i in range(6)]
        running = [asyncio.ensure_future(answer(llm, prompt, 150)) for prompt in prompts]
        await until(lambda: busy(llm, dp), "rows run on every engine")
        await llm.pause("keep")
        before = await steps(llm, dp)
        late = asyncio.ensure_future(answer(llm, prompt_of(5, 1), 3))
        await asyncio.sleep(0.2)
        assert await steps(llm, dp) == before
        assert not any(task.done() for task in [*running, late])
        await llm.resume()
        assert await asyncio.gather(*running) == [expected(prompt, 150) for prompt in prompts]
        assert await late == expected(prompt_of(5, 1), 3)


@pytest.mark.parametrize("dp", [1, 2])
async def test_rows_end_first_or_at_once(tmp_path: Path, dp: int) -> None:
    async with engines(tmp_path, dp) as llm:
        prompts = [prompt_of(40 + i, i) for i in range(4)]
        running = [asyncio.ensure_future(answer(llm, prompt, 150)) for prompt in prompts]
        await until(lambda: busy(llm, dp), "rows run on every engine")
        await llm.pause("wait")
        async with asyncio.timeout(5):  # the engines are done; their last tokens may still be on the way here
            assert await asyncio.gather(*running) == [expected(prompt, 150) for prompt in prompts]
        late = asyncio.ensure_future(answer(llm, prompt_of(5, 1), 400))
        await asyncio.sleep(0.1)
        assert not late.done()
        await llm.resume()
        await until(lambda: runs_somewhere(llm, dp), "it runs")
        await llm.pause("abort")
        with pytest.raises(OverloadedError, match="paused"):
            await late
        await llm.resume()
        assert await answer(llm, prompt_of(5, 1), 4) == expected(prompt_of(5, 1), 4)


async def test_a_later_pause_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    async with engines(tmp_path, 1) as llm:
        running = asyncio.ensure_future(answer(llm, prompt_of(9, 2), 100))
        await until(lambda: busy(llm, 1), "a row runs")
        waiting = asyncio.ensure_future(llm.pause("wait"))
        await asyncio.sleep(0.05)
        await llm.pause("keep")
        with pytest.raises(EngineError, match="another pause or resume"):
            await waiting
        with pytest.raises(EngineError, match="no pause 'never'"):
            await llm.pause("never")
        await llm.resume()
        assert await running == expected(prompt_of(9, 2), 100)


def test_the_blocking_twin_pauses_too(tmp_path: Path) -> None:
    with LLM(fake_model(tmp_path), **SMALL) as llm:
        llm.pause("keep")
        assert llm.stats()["pause"] == "keep"
        llm.resume()
        prompt = prompt_of(5, 1)
        (found,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert list(found.outputs[0].token_ids) == expected(prompt, 4)

"""A mixture of experts over two engines in lock step, as a user starts it: the tokens of one engine that has all experts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_families_more import make
from tests.models.tiny import write_byte_tokenizer
from tests.procs.fake_llm import prompt_of, until
from tests.procs.test_lockstep import num_running, parked, workers
from trireme import LLM, AsyncLLM, SamplingParams
from trireme.errors import ConfigError

pytestmark = pytest.mark.timeout(180)

SMALL: dict[str, Any] = {"kv_memory": "4MiB", "max_len": 512, "threads": 1, "max_num_tokens": 128}
PROMPTS = [prompt_of(3 + 41 * i % 150, 7 * i) for i in range(7)]
PARAMS = [SamplingParams(max_tokens=6 + 5 * i, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(7)]


@pytest.fixture(scope="module", params=["llama4", "llama4-scout", "gpt_oss", "qwen3_moe"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make(tmp_path_factory.mktemp("mixture"), request.param)
    write_byte_tokenizer(path)
    return path


def alone(path: Path) -> list[list[int]]:
    with LLM(path, **SMALL) as llm:
        return [list(found.outputs[0].token_ids) for found in llm.generate(PROMPTS, PARAMS)]


async def answers(llm: AsyncLLM) -> list[list[int]]:
    found = await asyncio.gather(*(llm.generate(p, q) for p, q in zip(PROMPTS, PARAMS, strict=True)))
    return [list(answer.outputs[0].token_ids) for answer in found]


async def test_two_engines_with_half_the_experts_each_say_what_one_says(mixture: Path) -> None:
    expected = await asyncio.to_thread(alone, mixture)
    async with AsyncLLM(mixture, **SMALL, dp=2, ep=True) as llm:
        assert ("ep", "2") in [(choice.what, choice.value) for choice in llm.decisions]
        assert await answers(llm) == expected
        both = await parked(llm)
        assert both[0]["collectives"] >= PARAMS[-1].max_tokens
        one = await llm.generate(PROMPTS[3], PARAMS[3])  # the other engine has no row, only experts
        assert list(one.outputs[0].token_ids) == expected[3]


async def test_a_killed_engine_takes_the_other_along_and_both_go_on(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt_oss")
    write_byte_tokenizer(path)
    params = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)

    def undisturbed() -> list[list[int]]:
        with LLM(path, **SMALL) as llm:
            return [list(found.outputs[0].token_ids) for found in llm.generate(PROMPTS[:4], params)]

    expected = await asyncio.to_thread(undisturbed)
    async with AsyncLLM(path, **SMALL, dp=2, ep=True) as llm:
        running = [asyncio.ensure_future(llm.generate(prompt, params)) for prompt in PROMPTS[:4]]
        await until(lambda: num_running(llm), "rows run")
        await llm.pause("keep")
        await llm.resume()
        assert not any(task.done() for task in running)
        os.kill((await workers(llm))[0]["pid"], signal.SIGKILL)
        found = [list(answer.outputs[0].token_ids) for answer in await asyncio.gather(*running)]
        assert found == expected
        assert [state.epoch for state in llm.health()] == [1, 1]


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be split over engines"):
        AsyncLLM("smollm2", dp=2, ep=True)

"""A fake model whose every token is known beforehand, and how tests ask for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models.tiny import make_stub
from trireme import AsyncLLM, SamplingParams
from trireme.params import RowParams
from trireme.workers.fake import FakeOptions, expected_tokens


def fake_model(directory: Path, **fake: Any) -> Path:
    """A model whose tokens depend on all that was computed before them."""
    make_stub(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["stub"]["kind"] = "hash"
    path.write_text(json.dumps({**config, "fake": fake}))
    return directory


def prompt_of(length: int, first: int) -> list[int]:
    return [33 + (first + i) % 60 for i in range(length)]


async def answer(llm: AsyncLLM, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    return list((await llm.generate(prompt, params)).outputs[0].token_ids)


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, RowParams(max_tokens=count, temperature=0), FakeOptions(), count)


async def until(true: Callable[[], Any], what: str, timeout_s: float = 20.0) -> Any:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        found = await true()
        if found:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {timeout_s} s: {what}")

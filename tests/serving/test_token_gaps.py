"""Gaps between tokens on /metrics: every one of every choice, as the engine's messages brought them, whoever reads how."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.models.tiny import make_stub
from tests.serving.deployment import Served, serve, serve_model
from tests.serving.engines import FakeEngine, words
from trireme.metrics import BY_NAME
from trireme.serving.engines.token_gaps import NO_TOKEN_S, TokenGaps

NAME = "trireme_inter_token_seconds"
BOUNDS_S = BY_NAME[NAME].buckets


def test_gaps_by_hand():
    gaps = TokenGaps((0.25, 0.5))
    gaps.add(1.0, {NO_TOKEN_S: 3})  # first tokens
    gaps.add(1.5, {1.0: 2, NO_TOKEN_S: 1, 1.5: 1})  # one choice gets two tokens at once
    assert (gaps.counts, gaps.total_s) == ([1, 2, 0], 1.0)
    gaps.add(1.75, {1.5: 3})
    gaps.add(2.5, {1.75: 1})
    assert (gaps.counts, gaps.total_s) == ([4, 2, 1], 2.5)


def test_a_p99_of_5_to_300_ms_can_be_read():
    among = [bound for bound in BOUNDS_S if 0.005 <= bound <= 0.3]
    assert (among[0], among[-1]) == (0.005, 0.3)
    assert all(b / a <= 1.6 for a, b in zip(among, among[1:], strict=False))


async def counted(served: Served) -> Mapping[float, float]:
    """Gaps so far, by the upper bound in seconds up to which they are counted; the number of all as that of infinity."""
    numbers = await served.numbers()
    assert numbers[f'{NAME}_bucket{{le="+Inf"}}'] == numbers[f"{NAME}_count"]
    return {bound: numbers[f'{NAME}_bucket{{le="{bound}"}}'] for bound in BOUNDS_S} | {
        float("inf"): numbers[f"{NAME}_count"]
    }


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_one_long_gap_is_seen_as_it_is(tmp_path: Path, is_streamed: bool) -> None:
    """The mean over the request would be far below it."""
    engine = FakeEngine(words("a" * 60), step_s=0.001)

    async def pause() -> None:
        while engine.step < 30:
            await asyncio.sleep(0)
        engine.hold.clear()
        await asyncio.sleep(0.35)
        engine.hold.set()

    async with serve(tmp_path, engine) as served:
        body = {"model": "stub", "prompt": "x", "max_tokens": 50, "stream": is_streamed}
        pausing = asyncio.create_task(pause())
        status, _, _ = await served.request("POST", "/v1/completions", body)
        await pausing
        assert status == 200
        seen = await counted(served)
        assert seen[float("inf")] == 49
        assert seen[float("inf")] - seen[0.3] == 1
        total_s = (await served.numbers())[f"{NAME}_sum"]
        assert 0.35 < total_s < 2.0


async def test_each_choice_has_its_own_gaps(tmp_path: Path) -> None:
    """Of a real engine: n choices of max_tokens tokens have n * (max_tokens - 1) gaps, a request of one token has none."""
    model = make_stub(tmp_path / "script", scripts=[["a"] * 64], delay_ms=2.0)
    async with serve_model(model) as served:
        for max_tokens, n, is_streamed in ((12, 3, True), (5, 2, False), (1, 4, True)):
            body = {"model": "stub", "prompt": "x", "max_tokens": max_tokens, "n": n, "stream": is_streamed}
            assert (await served.request("POST", "/v1/completions", body))[0] == 200
        seen = await counted(served)
        assert seen[float("inf")] == 3 * 11 + 2 * 4
        assert (await served.numbers())["trireme_generation_tokens_total"] == 3 * 12 + 2 * 5 + 4
        assert seen[0.001] < seen[float("inf")]  # a step takes 2 ms

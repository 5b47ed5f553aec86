"""A running node in a crowd: many who do nothing, some who do not read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e import crowd
from tests.e2e.deployment import Deployment, wait_for


@pytest.mark.timeout(180)
def test_a_crowd_of_idle_and_slow_readers_moves_nobody(tmp_path: Path) -> None:
    """Small, with slack for a busy machine; `python -m tests.e2e.crowd` measures."""
    model = crowd.make_wordy(tmp_path / "tiny", delay_ms=crowd.STEP_MS)
    with Deployment(model, *crowd.FLAGS) as empty, Deployment(model, *crowd.FLAGS) as full:
        alone, crowded = asyncio.run(crowd.compare(empty, full, idle=400, slow=40, num_probes=60))
        for before, after in zip(alone.p99_ms(), crowded.p99_ms(), strict=True):
            assert after <= 1.1 * before + 50
        wait_for(lambda: full.metric("trireme_kv_blocks", state="owned") == 0, 40, "all blocks back")


@pytest.mark.timeout(180)
def test_slow_readers_are_cut_off_and_their_blocks_freed(tmp_path: Path) -> None:
    """While their rows run: they have asked for far more than is computed by then."""
    model = crowd.make_wordy(tmp_path / "tiny", delay_ms=crowd.STEP_MS)
    flags = ("--served-name", "tiny", "--worker", "fake", "--stream-buffer", "16384")
    with Deployment(model, *flags) as deployment:
        readers = crowd.Crowd(deployment.port)
        try:
            asyncio.run(readers.open_slow(8, max_tokens=16000))
            wait_for(lambda: deployment.metric("trireme_requests_running") == 8, 20, "all of them run")
            assert deployment.metric("trireme_kv_blocks", state="owned") > 0
            wait_for(lambda: deployment.metric("trireme_slow_readers_total") == 8, 60, "all of them are cut off")
            wait_for(lambda: deployment.metric("trireme_kv_blocks", state="owned") == 0, 3, "all blocks back")
        finally:
            readers.close()
        wait_for(
            lambda: deployment.metric("trireme_requests_total", outcome="error") == 8, 5, "all of them count as errors"
        )
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        assert deployment.post("/v1/completions", body)["usage"]["completion_tokens"] == 4

"""Three times what can be served: whoever is refused knows it at once, and whoever is let in is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e import overload
from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama


@pytest.mark.timeout(180)
def test_at_three_times_the_load_refusals_come_at_once(tmp_path: Path) -> None:
    """50 ms at the 99th percentile, beside what an idle server takes at its own at the same time. A queue would take 600 ms."""
    model = make_tiny_llama(tmp_path / "tiny", fake={"delay_ms": overload.STEP_MS})
    with Deployment(model, *overload.FLAGS) as deployment, Deployment(model, *overload.FLAGS) as idle:
        load = overload.Load(deployment, idle)
        rate = 3 * overload.CAPACITY
        asyncio.run(load.run(rate, 6.0))
        print(overload.report(load, rate))
        assert len(load.refused) + len(load.served) == len(load.answers), "nobody got anything else"
        assert len(load.refused) > len(load.answers) / 3
        for answer in load.refused:
            assert answer.headers["retry-after"] == "1"
            assert answer.body["error"]["code"] == "overloaded"
        for answer in load.served:
            assert answer.body["usage"]["completion_tokens"] == overload.TOKENS
        for percent in (50, 99):
            took_ms = overload.p_ms([answer.took_s for answer in load.refused], percent)
            assert took_ms <= 50 + overload.p_ms(load.probes, percent)
        assert deployment.metric("trireme_requests_refused_total", code="overloaded") == len(load.refused)
        wait_for(lambda: deployment.metric("trireme_kv_blocks", state="owned") == 0, 5, "all blocks back")

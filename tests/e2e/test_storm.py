"""O21: streams opened and dropped leave nothing behind: rows, blocks and memory return to the start."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama


def open_and_drop(port: int, *, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = {"model": "tiny", "prompt": "drop me", "max_tokens": 512, "ignore_eos": True, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.readline().startswith(b"data: ")
    else:
        time.sleep(0.05)
    connection.close()


def is_quiet(deployment: Deployment) -> bool:
    used = deployment.metric("trireme_kv_blocks", state="owned")
    rows = deployment.metric("trireme_requests_running") + deployment.metric("trireme_requests_waiting")
    return used == 0 and rows == 0


@pytest.mark.timeout(240)
def test_dropped_streams_leave_nothing(tmp_path: Path) -> None:
    tiny = make_tiny_llama(tmp_path / "tiny")
    with Deployment(tiny, "--served-name", "tiny") as deployment:
        rss: list[int] = []
        for i in range(300):
            open_and_drop(deployment.port, stream=True)
            if i in (49, 299):
                wait_for(lambda: is_quiet(deployment), 1.0, f"all blocks back after {i + 1} dropped streams")
                rss.append(sum(psutil.Process(pid).memory_info().rss for pid in deployment.family()))
        assert rss[1] <= rss[0] * 1.05, rss
        with ThreadPoolExecutor(32) as pool:
            list(pool.map(lambda i: open_and_drop(deployment.port, stream=i % 2 == 0), range(64)))
        wait_for(lambda: is_quiet(deployment), 1.0, "all blocks back after 64 at once")
        body = {"model": "tiny", "prompt": "normal", "max_tokens": 8, "ignore_eos": True}
        start = time.monotonic()
        assert deployment.post("/v1/completions", body)["usage"]["completion_tokens"] == 8
        assert time.monotonic() - start < 5

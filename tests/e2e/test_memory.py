"""A front end that is given no more memory: a stream has every token, or says that it does not."""

from __future__ import annotations

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.models.tiny import NUM_BASE_TOKENS
from tests.procs.fake_llm import fake_model

pytestmark = pytest.mark.timeout(150)

NUM_STREAMS, NUM_TOKENS = 16, 1200
BODY = {"model": "tiny", "prompt": "x", "max_tokens": NUM_TOKENS, "ignore_eos": True}


def end_of(deployment: Deployment) -> str:
    """`done` for a whole answer, `short` for one that lacks tokens and does not say so, else what it ended with."""
    num_tokens = 0
    try:
        for event in deployment.stream({**BODY, "stream_options": {"include_usage": True}}):
            if "error" in event:
                return f"event {event['error']['code']}"
            num_tokens += len(event["choices"])
    except OSError as error:
        return type(error).__name__
    return "done" if num_tokens >= NUM_TOKENS else f"short {num_tokens}"


def press(deployment: Deployment, over: threading.Event) -> None:
    """Large bodies, for whoever has room for them."""
    while not over.is_set():
        try:
            deployment.post("/v1/completions", {**BODY, "prompt": "y " * 200_000, "max_tokens": 4}, timeout_s=20)
        except OSError:
            time.sleep(0.01)


def test_no_stream_lacks_tokens_without_a_word(tmp_path: Path) -> None:
    model = fake_model(tmp_path, delay_ms=5, low=33, high=min(90, NUM_BASE_TOKENS))
    with Deployment(model, "--served-name", "tiny", "--worker", "fake", "--max-len", "4096") as deployment:
        over = threading.Event()
        with ThreadPoolExecutor(NUM_STREAMS + 6) as pool:
            ends = [pool.submit(end_of, deployment) for _ in range(NUM_STREAMS)]
            time.sleep(1.0)
            front = deployment.pids("trireme.serving.main")[0]
            limits = resource.prlimit(front, resource.RLIMIT_AS)
            resource.prlimit(front, resource.RLIMIT_AS, (psutil.Process(front).memory_info().vms, limits[1]))
            for _ in range(6):
                pool.submit(press, deployment, over)
            time.sleep(4.0)
            over.set()
            if psutil.pid_exists(front):
                resource.prlimit(front, resource.RLIMIT_AS, limits)
            found = [end.result() for end in ends]
        assert not [end for end in found if end.startswith("short")], found

"""Workers that hardly ever get a processor, as on a machine that others keep busy: nobody ends them while they make progress."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama

pytestmark = pytest.mark.timeout(180)

STEP_TIMEOUT_S = 2.0
NUM_HOGS = 3
OUR_NICE = 5
FLAGS = ("--served-name", "model", "--tp", "2", "--threads", "1", "--step-timeout", str(STEP_TIMEOUT_S))
PROMPT = list(range(3, 250)) * 3


@contextlib.contextmanager
def starving(deployment: Deployment, pids: list[int]) -> Iterator[None]:
    """These processes share one processor with others of far more weight, whether the system weighs threads or sessions."""
    everywhere = os.sched_getaffinity(0)
    core = min(everywhere)
    burn = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    threads = [int(name) for pid in pids for name in os.listdir(f"/proc/{pid}/task")]
    hogs = [subprocess.Popen([sys.executable, "-c", burn], start_new_session=True) for _ in range(NUM_HOGS)]
    try:
        with contextlib.suppress(OSError):
            Path(f"/proc/{deployment.process.pid}/autogroup").write_text(str(OUR_NICE))
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(thread, {core})
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        for thread in threads:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, everywhere)


class Answer(threading.Thread):
    def __init__(self, deployment: Deployment, prompt: list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.deployment, self.found = deployment, ""
        self.body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        self.start()

    def run(self) -> None:
        found: Any = self.deployment.post("/v1/completions", self.body, timeout_s=120)
        self.found = found["choices"][0]["text"]


def test_starved_workers_are_not_stuck(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "m", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, head_dim=128)
    with Deployment(tmp_path / "m", *FLAGS) as deployment:
        undisturbed = Answer(deployment, PROMPT, 4)
        wait_for(lambda: undisturbed.found, 30, "an undisturbed answer")
        began = time.monotonic()
        with starving(deployment, deployment.pids("trireme.workers.main")):
            starved = Answer(deployment, PROMPT[::-1], 4)
            wait_for(lambda: starved.found, 60, "a starved answer")
        assert time.monotonic() - began > 3 * STEP_TIMEOUT_S, "they were not starved"
        assert deployment.metric("trireme_engine_epoch") == 0

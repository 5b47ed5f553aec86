"""`trireme control` on a running server of two engines: by its sockets, and by HTTP with its admin key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.deployment import ROOT, Deployment
from tests.models.tiny import make_stub
from tests.procs.fake_llm import fake_model
from trireme import LLM
from trireme.errors import EngineError

pytestmark = pytest.mark.timeout(120)


def control(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trireme.launch.cli", "control", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_both_ways_reach_every_engine(tmp_path: Path) -> None:
    flags = ("--worker", "fake", "--max-len", "1024", "--num-blocks", "512", "--dp", "2", "--admin-key", "boss")
    with Deployment(fake_model(tmp_path), *flags) as server:
        place = re.search(r"trireme\.Client\('([^']+)'\)", server.output())
        assert place is not None
        here, there = ["--dir", place[1]], ["--url", server.url, "--admin-key", "boss"]
        for way, other in ((here, there), (there, here)):
            done = control("sleep", "--level", "2", *way)
            assert (done.returncode, done.stdout) == (0, "engine 0  asleep (level 2)\nengine 1  asleep (level 2)\n")
            found = json.loads(control(*other, "--json").stdout)
            assert [(one["engine"], one["state"], one["sleep_level"]) for one in found] == [
                (0, "asleep", 2),
                (1, "asleep", 2),
            ]
            assert control("wake", *other).stdout == "engine 0  awake\nengine 1  awake\n"
            assert "awake, paused (keep)" in control("pause", "--mode", "keep", *way).stdout
            assert "paused" not in control("resume", *other).stdout
        refused = control("sleep", "--url", server.url)
        assert refused.returncode == 1
        assert "no valid admin key" in refused.stderr
        for words, said in ((["doze"], "ACTION is 'doze'"), (["sleep", "--level", "3"], "--level is 3")):
            wrong = control(*words, *here)
            assert (wrong.returncode, said in wrong.stderr) == (2, True), wrong.stderr


def test_a_client_of_a_cpu_engine_is_told_that_it_has_no_sleep(tmp_path: Path) -> None:
    with LLM(str(make_stub(tmp_path / "m"))) as llm:
        with pytest.raises(EngineError, match="--device cuda has one"):
            llm.sleep()
        assert llm.resting() == [{"engine": 0, "state": "awake", "sleep_level": 0, "pause": ""}]

"""A few rounds of `make kills`: processes killed at random moments, every answer equal to the undisturbed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.deployment import ROOT
from tests.models.tiny import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(("tp", "rounds"), [(1, 12), (2, 6)])
def test_kills_at_random_moments(tmp_path: Path, tp: int, rounds: int) -> None:
    model = make_tiny_llama(tmp_path / "tiny", max_position_embeddings=2048)
    command = [sys.executable, "-m", "scripts.kills", "--model", str(model), "--tp", str(tp), "--rounds", str(rounds)]
    command += ["--coordinator-rounds", "5" if tp == 1 else "0", "--seed", str(os.getpid())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert f"kills: {rounds} of {rounds} equal" in done.stdout

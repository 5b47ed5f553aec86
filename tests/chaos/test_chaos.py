"""`make chaos` in small: two kills in the normal tier, every fault a few times in the long one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.chaos.run import chosen
from tests.e2e.deployment import ROOT


def chaos(*options: str, timeout_s: float) -> str:
    command = [sys.executable, "-m", "tests.chaos.run", "--seed", str(os.getpid()), *options]
    if os.getloadavg()[0] > (os.cpu_count() or 1):  # others keep this machine busy
        command.append("--tell-late")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{command}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.timeout(150)
def test_two_faults() -> None:
    said = chaos("--fault", "kill-engine-core", "kill-one-api-server", "--times", "1", timeout_s=140)
    assert "chaos: 2 injections of 2 faults, 0 bad, " in said


def test_what_cannot_be_done_is_not_counted() -> None:
    said = chaos("--fault", "kill-kv-store", timeout_s=60)
    assert "not applicable: there is no KV store yet" in said
    assert "chaos: 0 injections of 0 faults, 0 bad, 0 late; 1 not applicable" in said


@pytest.mark.slow
@pytest.mark.timeout(620)
@pytest.mark.parametrize(
    ("family", "times"), [("kill", 3), ("freeze", 2), ("message", 4), ("resource", 3), ("request", 3)]
)
def test_every_fault(family: str, times: int) -> None:
    """About ten minutes in all on a machine that does nothing else."""
    num_faults = sum(not fault.missing for fault in chosen([family]))
    said = chaos("--fault", family, "--times", str(times), timeout_s=600)
    assert f"chaos: {times * num_faults} injections of {num_faults} faults, 0 bad, " in said

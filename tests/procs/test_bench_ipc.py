"""`trireme bench ipc` through real processes, small: every figure is there and fits the others."""

from __future__ import annotations

import json
import subprocess
import sys


def test_every_figure_is_there_and_all_tokens_are_counted() -> None:
    length = 64
    command = [
        sys.executable,
        "-m",
        "trireme.launch.cli",
        "bench",
        "ipc",
        "--running",
        "1,3",
        "--output-len",
        str(length),
    ]
    command.append("--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == ["1 running", "3 running"]
    for row, running in zip(rows, (1, 3), strict=True):
        assert (
            length <= row["steps"] <= running * length + 4
        )  # (on a busy machine one row may begin when another has ended)
        assert row["tokens_s"] > 0 < row["messages_s"]
        assert 0 < row["step_p50_ms"] <= row["step_p99_ms"]
        assert 0 < row["core_step_ms"] < 100
        assert 0 < row["bytes_per_token"] < 50


def test_a_wrong_number_of_requests_is_refused_with_an_example() -> None:
    command = [sys.executable, "-m", "trireme.launch.cli", "bench", "ipc", "--running", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "each must be 1..8192" in done.stderr
    assert "--running 1,64,256" in done.stderr

"""What a start says of its own time, held against a clock outside: through `trireme serve`, `bench startup` and LLM."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import ROOT, Deployment
from tests.models.tiny import make_tiny_llama
from trireme import LLM
from trireme.launch.api.startup import line_of

pytestmark = pytest.mark.timeout(180)

SHAPES: dict[str, tuple[str, ...]] = {
    "one process": (),
    "a process for each worker": ("--tp", "2", "--executor", "procs"),
    "two engines, two fronts": ("--dp", "2", "--api-servers", "2"),
}
SMALL = ("--threads", "1", "--max-len", "256", "--num-blocks", "64")


def close(told: float, wall: float) -> bool:
    return abs(told - wall) <= max(0.1 * wall, 0.3)


def parts_in(text: str) -> dict[str, float]:
    """Of the line under `ready in`."""
    line = text[text.index("ready in") :].splitlines()[1]
    return {name: float(seconds) for name, seconds in re.findall(r"(\w+) ([\d.]+)", line)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("startup") / "tiny")


@pytest.mark.parametrize("flags", SHAPES.values(), ids=SHAPES)
def test_the_parts_of_a_server_add_up_to_the_time_until_it_says_ready(tiny: Path, flags: tuple[str, ...]) -> None:
    server = Deployment(tiny, *SMALL, *flags)
    begun = time.monotonic()
    server.launch()
    try:
        while "ready in" not in (text := server.output()):
            assert server.process.poll() is None, text
            assert time.monotonic() - begun < 90
            time.sleep(0.005)
        wall = time.monotonic() - begun
        server.wait_ready(30)
        text = server.output()
    finally:
        server.stop(kill=True)
    parts = parts_in(text)
    told = re.search(r"ready in ([\d.]+) s", text)
    assert told is not None
    assert close(sum(parts.values()), wall), (parts, wall)
    assert close(float(told[1]), wall)
    assert {"launcher", "process", "import"} <= set(parts)
    assert "workers" in parts or "--tp" not in flags, parts  # (a process each takes its time to begin)


def test_bench_startup_tells_the_same_parts_and_the_first_token(tiny: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "trireme.launch.cli",
        "bench",
        "startup",
        str(tiny),
        *SMALL,
        "--repeats",
        "1",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    parts = {k: v for k, v in row.items() if k.endswith("_s") and k not in ("total_s", "front_ready_s")}
    assert sum(parts.values()) == pytest.approx(row["total_s"], abs=1e-3)
    assert {"launcher_s", "process_s", "import_s", "weights_s", "kv_s", "fronts_s", "first_token_s"} <= set(parts)
    assert all(seconds > -0.02 for seconds in parts.values()), parts  # (the launch is known to a hundredth)


@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=["in a thread", "in processes"])
def test_an_llm_knows_where_its_start_went(
    tiny: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    with LLM(str(tiny), threads=1, max_len=256, num_blocks=64, progress=True, **settings) as llm:
        wall = time.monotonic() - begun
        assert close(sum(llm.startup.values()), wall), (llm.startup, wall)
        assert {"launcher", "weights", "kv", "client"} <= set(llm.startup)
        assert line_of(llm.startup) in capsys.readouterr().err

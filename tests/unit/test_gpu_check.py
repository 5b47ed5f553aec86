"""scripts/gpu_check.py where no card is: its command line, its skip, and its floors. The rest of it needs a card."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_options_after_two_dashes_are_for_pytest(check: ModuleType) -> None:
    found = check.parse(["test", "--json", "facts.json", "--", "-p", "no:benchmark", "-n", "12"])
    assert (found.part, str(found.json), found.pytest) == ("test", "facts.json", ["-p", "no:benchmark", "-n", "12"])
    assert check.parse([]).part == "all"
    with pytest.raises(SystemExit):
        check.parse(["test", "-n", "12"])


def test_the_longer_floor_counts(check: ModuleType) -> None:
    ceilings = check.Ceilings(bytes_per_s=1e12, ops_per_s=1e14)
    assert check.floor_us(ceilings, 1e6) == pytest.approx(1.0)
    assert check.floor_us(ceilings, 1e6, 1e9) == pytest.approx(10.0)
    line = check.Timing("linear bf16", "1 x 4096x4096", 12.0, 10.0, 15.0).line()
    assert "1.20x" in line
    assert "15.0" in line


def test_without_a_card_it_says_so(check: ModuleType) -> None:
    if not check.what_is_missing():
        pytest.skip("there is a card")
    done = subprocess.run([sys.executable, str(SCRIPT), "test"], capture_output=True, text=True, timeout=100)
    assert done.returncode == check.NO_CARD
    assert done.stdout.startswith("skipped: torch")

"""What `make test` makes of its parts: every test is in one of them, and no failure is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.run_tests import CHECKS, PURE, TIMED, WATCHING, commands, passed, run, selections

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", [*TIMED, *PURE])
def test_the_timed_part_names_what_exists(name: str) -> None:
    assert (TESTS / name).exists()


def test_every_file_is_in_exactly_one_part() -> None:
    files = {path for path in TESTS.rglob("test_*.py") if "gpu" not in path.parts}
    found: list[Path] = []
    for words in selections().values():
        roots = [TESTS.parent / word for word in words if not word.startswith("--")]
        ignored = [TESTS.parent / word.removeprefix("--ignore=") for word in words if word.startswith("--")]
        found += [
            path
            for path in files
            if any(path.is_relative_to(root) for root in roots) and not any(path.is_relative_to(i) for i in ignored)
        ]
    assert sorted(found) == sorted(files)
    assert {*WATCHING, "computing", "models"} == {*selections()}
    assert {*commands([])} == {*selections(), *CHECKS}


@pytest.mark.parametrize(
    ("codes", "checks", "is_good"),
    [
        ([0, 0], [0], True),
        ([0, 5], [], True),
        ([5, 0], [0], True),
        ([5, 5], [0], False),
        ([0, 1], [0], False),
        ([2, 0], [0], False),
        ([-15, 0], [0], False),
        ([0, 0], [1], False),
        ([0, 0], [0, 5], False),
    ],
)
def test_all_must_pass_and_one_must_run(codes: list[int], checks: list[int], is_good: bool) -> None:
    assert passed(codes, checks) == is_good


def test_each_command_runs_once_and_its_output_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    names = ["serving", "computing", "models", "types", "cuda"]
    told = run({name: [sys.executable, "-c", f"print('I am {name}'); exit({at})"] for at, name in enumerate(names)})
    assert told == {name: at for at, name in enumerate(names)}
    output = capfd.readouterr().out
    assert [output.count(f"I am {name}") for name in names] == [1] * 5
    assert "the part cuda:\nI am cuda" in output


def test_the_quick_ones_are_a_part_of_all() -> None:
    assert {*commands(["--quick", "-x"])} == {"quick", "types"}
    assert commands(["--quick", "-x"])["quick"][-1] == "-x"

"""What `make test` makes of its parts: every test is in one of them, and no failure is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.run_tests import LATER, PARTS, PURE, TIMED, passed, selections

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
    assert {*PARTS, *LATER, "computing"} == {*selections()}


@pytest.mark.parametrize(
    ("codes", "is_good"),
    [
        ([0, 0], True),
        ([0, 5], True),
        ([5, 0], True),
        ([5, 5], False),
        ([0, 1], False),
        ([2, 0], False),
        ([-15, 0], False),
    ],
)
def test_both_parts_must_pass_and_one_must_run(codes: list[int], is_good: bool) -> None:
    assert passed(codes) == is_good

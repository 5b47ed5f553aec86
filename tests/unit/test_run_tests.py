"""What `make test` makes of its two parts: every test is in one of them, and no failure is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.run_tests import TIMED, passed

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", TIMED)
def test_the_timed_part_names_what_exists(name: str) -> None:
    assert (TESTS / name).exists()


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

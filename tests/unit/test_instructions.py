"""Instruction counts of a hot path against the budget, where valgrind is installed; the budget file itself everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scripts import count_instructions
from scripts.count_instructions import BUDGET, CASES, NO_VALGRIND, main


def test_every_case_has_a_budget_and_runs():
    assert set(json.loads(BUDGET.read_text())["counts"]) == set(CASES)
    for case in CASES.values():
        case(0)


def test_without_valgrind_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main([]) == NO_VALGRIND
    assert "valgrind" in capsys.readouterr().err


@pytest.mark.parametrize(("counted", "status"), [(1000, 0), (1040, 0), (900, 0), (1060, 1)])
def test_more_than_the_tolerance_fails(monkeypatch, tmp_path, counted, status):
    budget = Path(tmp_path, "budget.json")
    budget.write_text(json.dumps({"python": "", "counts": {"codec": 1000}}))
    monkeypatch.setattr(count_instructions, "BUDGET", budget)
    monkeypatch.setattr(count_instructions, "count", lambda case: counted)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/valgrind")
    assert main(["codec"]) == status
    assert main(["codec", "--write"]) == 0
    assert json.loads(budget.read_text())["counts"] == {"codec": counted}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_hot_paths_stay_within_their_budget():
    assert main([]) == 0

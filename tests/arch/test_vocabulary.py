"""One meaning a word: no class is defined twice, and words that were replaced stay out of the names of files and classes."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coordinator", "engine_core", "launch", "models", "serving", "transport", "workers")
SOURCES = sorted(path for package in (*PACKAGES, "trireme") for path in (ROOT / package).rglob("*.py"))

REPLACED = (
    "asking",
    "chooser",
    "cohort",
    "company",
    "door",
    "egg",
    "ends",
    "fleet",
    "hatch",
    "meeting",
    "narrow",
    "pace",
    "passes",
    "rest",
    "shelf",
    "siblings",
    "talk",
    "talker",
    "ways",
    "wired",
)
"""Words of file and class names for which docs/glossary.md has the field's term."""


def words(name: str) -> set[str]:
    return set(re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower().split("_"))


def class_definitions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_no_class_name_is_defined_twice() -> None:
    assert len(SOURCES) > 200
    twice = {name: places for name, places in class_definitions().items() if len(places) > 1}
    assert not twice


def test_replaced_words_are_in_no_name_of_a_file_or_class() -> None:
    files = {str(path.relative_to(ROOT)) for path in SOURCES if words(path.stem) & set(REPLACED)}
    classes = {name for name in class_definitions() if words(name) & set(REPLACED)}
    assert (files, classes) == (set(), set())

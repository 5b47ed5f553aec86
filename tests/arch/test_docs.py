"""The documents say what is there: paths and links exist, every error code has a cure, the pages keep their size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.arch.test_vocabulary import REPLACED

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
USER_FILES = ("my_package/policy.py",)
"""Files of a reader's own that a page may name."""

_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.{},*-]+(?:/[\w.{},*-]+)+\.(?:py|md|cpp|cu|h)\b")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"^\s+(?:self\.)?code = \"(\w+)\"", re.MULTILINE)
PACKAGES = ("trireme", "coordinator", "engine_core", "launch", "models", "serving", "transport", "workers")


def named_paths(page: Path) -> set[str]:
    return {path for span in _SPAN.findall(page.read_text()) for path in _PATH.findall(span)}


def spread(path: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    before, brace, rest = path.partition("{")
    inside, _, after = rest.partition("}")
    return [before + name + after for name in inside.split(",")] if brace else [path]


def names_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=names_of)
def test_paths_in_backticks_exist(page: Path) -> None:
    paths = {one for path in named_paths(page) for one in spread(path)} - set(USER_FILES)
    assert not [path for path in sorted(paths) if not any(ROOT.glob(path))]


def test_the_pages_name_many_paths() -> None:
    """The expressions above find what they are for."""
    assert len(PAGES) > 25
    assert len(set().union(*map(named_paths, PAGES))) > 60
    assert spread("models/arch/{rope,norms}.py") == ["models/arch/rope.py", "models/arch/norms.py"]


@pytest.mark.parametrize("page", PAGES, ids=names_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not [link for link in _LINK.findall(page.read_text()) if not (page.parent / link).exists()]


def test_every_error_code_has_a_row() -> None:
    sources = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    codes = {code for path in sources for code in _CODE.findall(path.read_text())}
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(codes) > 25
    assert (codes - set(rows), set(rows) - codes) == (set(), set())


def test_every_family_that_has_a_body_has_a_row() -> None:
    """docs/models.md is made from the readers; the bodies are another table."""
    from trireme.models.registry import FAMILIES

    rows = set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE))
    assert len(rows) > 20
    assert not set(FAMILIES) - rows


def test_every_replaced_word_has_its_term() -> None:
    table = (ROOT / "docs" / "glossary.md").read_text().partition("## Replaced words")[2]
    assert set(re.findall(r"(\w+)\*", table)) == set(REPLACED)


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.split("|")]
    assert not [cell for cell in cells if len(cell) > 120]


@pytest.mark.parametrize("name", ["add-a-policy", "add-a-model", "add-a-kernel"])
def test_a_guide_fits_a_screen_and_ends_with_its_tests(name: str) -> None:
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert len(text.splitlines()) <= 60
    assert "Tests to write" in text
    assert "`tests/" in text.partition("Tests to write")[2]

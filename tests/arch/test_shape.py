"""A reader holds a function on one screen and an object in the head: no function over 60 lines, no class over 20 attributes.

What counts: lines from `def` to the last one, docstring included, decorators not. Attributes are the fields that a class declares
(records, dataclasses) and what any of its methods sets on self, so that nothing hides outside the constructor; properties do not
count. Records that mirror somebody else's document are as large as that document: DOCUMENTS.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.arch.test_vocabulary import ROOT, SOURCES

MOST_LINES, MOST_ATTRIBUTES = 60, 20

# Modules whose records (subclasses of Struct or of one of their own records) may have any number of fields.
DOCUMENTS = {
    "serving/api/openai/wire.py": "the bodies of OpenAI's requests",
    "trireme/config.py": "the settings: one field for each flag",
    "trireme/model/hf_config.py": "config.json",
    "trireme/model/hf_families.py": "config.json, by family",
    "trireme/model/spec.py": "what the families of models differ in",
    "trireme/params.py": "the parameters of a request",
}


def nodes_of(kind: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kind):
                yield str(path.relative_to(ROOT)), node


def attributes_of(node: ast.ClassDef) -> set[str]:
    fields = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    on_self = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }
    properties = {each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.decorator_list}
    return fields | on_self - properties


def is_record(node: ast.ClassDef) -> bool:
    """Declares fields and sets none: all of it is data."""
    return bool(node.bases) and not any(
        isinstance(each, ast.FunctionDef) and each.name == "__init__" for each in node.body
    )


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        (path, node.name): node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef)
        for path, node in nodes_of(kind)
    }
    assert len(lengths) > 2000
    assert not {at: lines for at, lines in lengths.items() if lines > MOST_LINES}


def test_no_class_has_more_attributes_than_a_head_can_hold() -> None:
    too_many: dict[tuple[str, str], int] = {}
    for path, node in nodes_of(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        count = len(attributes_of(node))
        if count > MOST_ATTRIBUTES and not (path in DOCUMENTS and is_record(node)):
            too_many[path, node.name] = count
    assert not too_many


def test_the_modules_of_documents_are_there() -> None:
    assert not [path for path in DOCUMENTS if not (ROOT / path).is_file()]


def test_what_counts_as_an_attribute() -> None:
    (node,) = ast.parse(
        "class Sample(Base):\n"
        "    field: int\n"
        "    shared: ClassVar[int] = 0\n"
        "    @property\n"
        "    def derived(self): ...\n"
        "    def __init__(self):\n"
        "        self.first, self._second = 1, 2\n"
        "        self.derived = 3\n"
        "        other.attribute = self.field\n"
        "    def later(self):\n"
        "        self._third: int = 3\n"
    ).body
    assert isinstance(node, ast.ClassDef)
    assert attributes_of(node) == {"field", "first", "_second", "_third"}
    assert not is_record(node)

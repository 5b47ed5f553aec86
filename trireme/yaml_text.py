"""YAML as names and strings: every scalar is its literal text, and the caller decides what it means.

YAML's own guesses are wrong for settings (`off` is a string there, `017` is not octal, `1.10` is a version, `12:30` a time), and
its silence about duplicate keys hides mistakes. Called by trireme/settings.py and for the quota file. Errors name the line and
never quote it: it may hold a key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trireme.errors import ConfigError

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

MAX_BYTES = 16 << 20
MAX_VALUES = 1_000_000  # aliases expand few characters into many values
MAX_DEPTH = 16
_NULLS = ("", "~", "null", "Null", "NULL")
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map"))
_QUOTED = re.compile(r"'[^'<][^']{2,}'")

Value: TypeAlias = "str | None | list[Value] | dict[str, Value]"


def read_yaml(path: Path) -> Value:
    """The contents of a file; a plain null, or an empty file, is None. Raises ConfigError, also for a duplicate key in a
    mapping."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes, the limit for a file of settings")
    try:
        return parse_yaml(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not YAML: byte {error.start} is not UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path} {error.message}", hint=error.hint) from None


def parse_yaml(text: str) -> Value:
    """Like read_yaml; errors say what the text `is` or `has`."""
    import yaml  # the import costs 30 ms; only runs with a file pay for it

    try:
        node = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
        problem = _QUOTED.sub("...", error.problem or error.context or "")
        raise ConfigError(f"is not YAML: {problem}{where}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError("is not YAML for settings: it is nested too deeply") from None
    return None if node is None else _YamlReader().value(node, "", 0)


class _YamlReader:
    """Converts nodes to plain values, within bounds."""

    def __init__(self) -> None:
        self._num_values = 0

    def value(self, node: Node, place: str, depth: int) -> Value:
        """A node as text, dict or list. `place` is its path, for errors. Raises ConfigError for values beyond the bounds and for
        tags."""
        from yaml.nodes import MappingNode, ScalarNode

        line = node.start_mark.line + 1
        self._num_values += 1
        if depth > MAX_DEPTH:  # also stops self-referencing aliases
            raise ConfigError(f"has values nested more than {MAX_DEPTH} deep, in line {line}")
        if self._num_values > MAX_VALUES:
            raise ConfigError(f"has more than {MAX_VALUES} values")
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(
                f"has a tag that is not supported, in line {line}", hint="quote a text that begins with !"
            )
        if isinstance(node, ScalarNode):
            return None if node.style is None and node.value in _NULLS else str(node.value)
        if isinstance(node, MappingNode):
            return self._mapping(node, place, depth)
        return [self.value(item, f"{place}[{i}]", depth + 1) for i, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, place: str, depth: int) -> dict[str, Value]:
        from yaml.nodes import ScalarNode

        found: dict[str, Value] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                raise ConfigError(f"has a name that is no text, in line {line}")
            name = str(key.value)
            shown = f"{place}.{name}" if place else name
            if name in found:
                raise ConfigError(f"has {shown} twice, in lines {lines[name]} and {line}", hint="remove one of them")
            found[name], lines[name] = self.value(value, shown, depth + 1), line
        return found

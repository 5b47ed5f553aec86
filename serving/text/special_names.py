"""One pattern that finds the names of a vocabulary's special tokens, of which there may be thousands, in linear time.

Used by serving/api/openai/chat.py and serving/text/tokens.py. The names share their beginnings (`<unused0>`, `<unused1>`,
...), so the pattern is a tree of characters: at each place of a text it follows one path instead of trying every name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_Node = dict[str, "_Node"]
_END = ""  # key of a node where a name is complete


def names_pattern(names: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the leftmost name, and the longest of those that begin there. None when there is no name."""
    root: _Node = {}
    for name in names:
        if name:
            node = root
            for char in name:
                node = node.setdefault(char, {})
            node[_END] = {}
    return re.compile(_pattern_of(root)) if root else None


def _pattern_of(node: _Node) -> str:
    literal = ""
    while len(node) == 1 and _END not in node:
        ((char, node),) = node.items()
        literal += re.escape(char)
    branches = [re.escape(char) + _pattern_of(child) for char, child in node.items() if char != _END]
    if not branches:
        return literal
    return f"{literal}(?:{'|'.join(branches)})" + ("?" if _END in node else "")

"""Parses `--graph-sizes`. Pure; checked by resolve before anything starts, used by GPU workers."""

from __future__ import annotations

from typing import NamedTuple

from trireme.errors import ConfigError

MOST_NAMED = 64


class GraphSizes(NamedTuple):
    """Batch sizes of the captured steps: the `named` ones, or those found to be needed."""

    adapts: bool
    named: tuple[int, ...] = ()


def graph_sizes(asked: str, max_rows: int) -> GraphSizes:
    """Raises ConfigError for anything but auto, none, or batch sizes that a step of `max_rows` can have."""
    if asked == "auto":
        return GraphSizes(adapts=True)
    if asked == "none":
        return GraphSizes(adapts=False)
    words = [word.strip() for word in asked.split(",")]
    if len(words) > MOST_NAMED:
        raise ConfigError(
            f"--graph-sizes names {len(words)} sizes; the limit is {MOST_NAMED}", hint="--graph-sizes auto"
        )
    for word in words:
        if not (word.isascii() and word.isdecimal() and 1 <= int(word[:9]) <= max_rows and len(word) < 9):
            raise ConfigError(
                f"--graph-sizes {word:.20}: not auto, none or numbers of sequences in a step, 1 to {max_rows}",
                hint=f"--graph-sizes 1,{max_rows}" if max_rows > 1 else "--graph-sizes 1",
            )
    return GraphSizes(adapts=False, named=tuple(sorted({int(word) for word in words})))

"""Trace of a simulated world, line by line: time, process, event. Kept only on request.

Two runs of one seed have equal traces; `digest` compares them without keeping lines.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from trireme.transport.wire.columns import unpack, unpack_ids

MAX_TEXT = 160


class Trace:
    """Lines of time, process, event."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, now: float, who: str, what: str) -> None:
        self.lines.append(f"{now:10.6f}  {who:<24} {what}")

    @property
    def digest(self) -> int:
        return zlib.crc32("\n".join(self.lines).encode())


def told(message: Any) -> str:
    """A message in short: its type, and the fields that are not empty."""
    fields = getattr(message, "__struct_fields__", ())
    if not fields:
        return str(message)[:MAX_TEXT]
    shown = (f"{name}={_short(name, getattr(message, name))}" for name in fields if _matters(message, name))
    return f"{type(message).__name__} {' '.join(shown)}"[:MAX_TEXT]


def _matters(message: msgspec.Struct, name: str) -> bool:
    value = getattr(message, name)
    is_empty = hasattr(value, "__len__") and len(value) == 0
    return not is_empty and name not in ("params", "facts", "protocol", "config_hash", "pid", "role", "salt", "label")


def _short(name: str, value: Any) -> str:
    if isinstance(value, bytes) and name in ("rids", "tokens"):
        return str((unpack_ids(value) if name == "rids" else unpack(value)).tolist())
    if name == "members":
        return str([(member.engine, member.epoch, member.state, member.in_flight) for member in value])
    if hasattr(value, "tolist"):
        return f"{len(value)} tokens"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)

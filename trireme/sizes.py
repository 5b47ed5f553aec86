"""Sizes in bytes and times as text, both ways. Used by settings, budgets and everything that prints a size."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

_UNITS = {"": 1, "b": 1, "k": KIB, "kib": KIB, "kb": 1000, "m": MIB, "mib": MIB, "mb": 1000**2}
_UNITS |= {"g": GIB, "gib": GIB, "gb": 1000**3, "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4}


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `1.5g`, `1000000` as bytes. Raises ValueError that says what was expected."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("a size is a number and a unit (KiB, MiB, GiB, TiB)")
    number = float(match[1]) * unit
    if not 1 <= number < 2**63:
        raise ValueError("a size must be above 0 and below 8 EiB")
    size = int(number)
    return size


def format_bytes(size: float) -> str:
    """`1.5 GiB`: three digits and the largest fitting unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 999.5 * unit else f"{size / unit:.0f} {name}"
    return f"{size:.0f} B"


_SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "": 1.0}


def parse_seconds(text: str) -> float:
    """`50ms`, `1.5s`, `2min`, `0.05` in seconds. Raises ValueError that says what was expected."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in _SECONDS:
        raise ValueError("a time is a number and a unit (ms, s, min)")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= 86400:
        raise ValueError("a time must be above 0 and at most a day")
    return seconds


def format_seconds(seconds: float) -> str:
    """`12 ms`, `1.5 s`: three digits."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"

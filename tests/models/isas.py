"""Instruction sets in tests: one is chosen for a while, then the one from before is back. (Not the best one: a machine may have one
that is used on request only.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trireme.models.native import load_native


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Native operations use this one meanwhile. ValueError where the machine has no such set."""
    native = load_native()
    before = native.isa()
    native.set_isa(name)
    try:
        yield
    finally:
        native.set_isa(before)

"""What a GPU's worker has the collector do: circles of a start end with a sleep, and nothing ends inside a capture."""

from __future__ import annotations

import gc
import weakref

from trireme.transport.process.boot import settle_memory
from trireme.workers.cuda.graphs import _nothing_collected
from trireme.workers.cuda.worker import _collect


class Circle:
    def __init__(self) -> None:
        self.me = self


def test_what_a_start_left_is_collected() -> None:
    circle = Circle()
    settle_memory()
    try:
        seen = weakref.ref(circle)
        del circle
        gc.collect()
        assert seen() is not None  # or this test would show nothing
        _collect()
        assert seen() is None
    finally:
        gc.unfreeze()


def test_nothing_is_collected_inside_a_capture() -> None:
    assert gc.isenabled()
    seen = []
    with _nothing_collected():
        circles = [Circle() for _ in range(5000)]
        seen = [weakref.ref(circle) for circle in circles]
        del circles
        assert not gc.isenabled()
        assert all(ref() is not None for ref in seen)
    assert gc.isenabled()
    gc.collect()
    assert not any(ref() is not None for ref in seen)

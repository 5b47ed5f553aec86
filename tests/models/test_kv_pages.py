"""The first KV memory is resident before anybody uses it, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from models.forward import HostKV
from workers.kv_pages import SHARE, ResidentKv

LAYERS, BYTES = 4, 24 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_kv() -> list[HostKV]:
    return [HostKV(k=np.zeros(BYTES, np.uint8), v=np.zeros(BYTES, np.uint8)) for _ in range(LAYERS)]


def test_a_share_of_the_memory_becomes_resident() -> None:
    kv = make_kv()
    pages = ResidentKv(kv, yields=False)
    before = resident_bytes()
    pages.start()
    assert pages.wait(60.0)
    assert pages.num_done == pages.num_bytes == 2 * LAYERS * BYTES // SHARE
    gained = resident_bytes() - before
    assert 0.9 * pages.num_bytes < gained < 2 * pages.num_bytes + 2 * LAYERS * (4 << 20)  # large pages round up
    assert not any(layer.k.any() or layer.v.any() for layer in kv)


def test_stopping_it_returns_and_nothing_is_touched_after() -> None:
    pages = ResidentKv(make_kv())
    pages.start()
    pages.stop()
    done = pages.num_done
    assert pages.wait(0.0)
    assert pages.num_done == done
    ResidentKv(make_kv()).stop()
    assert ResidentKv([]).num_bytes == 0

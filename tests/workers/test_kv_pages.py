"""KV memory is resident before anybody uses it: a reserve beyond the highest block in use, and only that."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

import numpy as np
from numpy.typing import NDArray

from trireme.models.forward import HostKV
from trireme.workers.cpu.kv_pages import SHARE, ResidentKv

LAYERS, BLOCKS, BLOCK_BYTES = 4, 1 << 12, 6 << 10
TOTAL = 2 * LAYERS * BLOCKS * BLOCK_BYTES


def resident_bytes(kv: list[HostKV]) -> int:
    """Of these arrays, as the system counts their pages (mincore)."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    found, page = 0, os.sysconf("SC_PAGE_SIZE")
    for array in (array for layer in kv for array in (layer.k, layer.v)):
        first, end = array.ctypes.data // page * page, array.ctypes.data + array.nbytes
        pages = ctypes.create_string_buffer(-(-(end - first) // page))
        assert mincore(first, end - first, pages) == 0
        found += page * sum(byte & 1 for byte in pages.raw)
    return found


def make_kv() -> list[HostKV]:
    return [HostKV(k=untouched(), v=untouched()) for _ in range(LAYERS)]


def untouched() -> NDArray[np.uint8]:
    """Zeros that nobody has touched: those of numpy may be memory that was in use before."""
    memory = mmap.mmap(-1, BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8).reshape(BLOCKS, BLOCK_BYTES)


def is_near(gained: int, wanted: int) -> bool:
    return 0.9 * wanted < gained < 1.2 * wanted + 2 * LAYERS * (4 << 20)  # large pages round up


def test_the_reserve_becomes_resident_and_follows_the_use() -> None:
    kv = make_kv()
    pages = ResidentKv(kv, yields=False)
    assert resident_bytes(kv) < TOTAL // 100
    pages.start()
    assert pages.wait(60.0)
    assert pages.reserve == BLOCKS // SHARE
    assert is_near(resident_bytes(kv), TOTAL // SHARE)

    pages.follow(BLOCKS // SHARE // 2 - 1)  # more than half of the reserve is left
    time.sleep(0.05)
    assert is_near(resident_bytes(kv), TOTAL // SHARE)
    pages.follow(BLOCKS // 2)
    assert pages.wait(60.0)
    assert is_near(resident_bytes(kv), TOTAL // 2 + TOTAL // SHARE)
    pages.follow(BLOCKS - 1)
    assert pages.wait(60.0)
    assert is_near(resident_bytes(kv), TOTAL)
    assert TOTAL <= pages.num_bytes < 1.1 * TOTAL
    pages.follow(BLOCKS)
    pages.stop()
    assert not any(layer.k.any() or layer.v.any() for layer in kv)


def test_stopping_it_returns_and_nothing_is_touched_after() -> None:
    pages = ResidentKv(make_kv())
    pages.start()
    pages.follow(BLOCKS)
    pages.stop()
    done = pages.num_bytes
    assert pages.wait(0.0)
    pages.follow(BLOCKS)
    assert pages.num_bytes == done
    ResidentKv(make_kv()).stop()
    assert ResidentKv([]).num_blocks == 0

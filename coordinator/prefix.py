"""Prefix index: which engine has cached which blocks, exactly for near engines, in counting Bloom filters for far ones.

Pure. Fed by core.py with the engines' reports (KVEvents), queried for each request. A key is 8 bytes of a block's hash
(trireme/hashing.py), so one key stands for the whole prefix up to that block. Wrong answers are harmless: an engine checks its own
cache. Memory: 16 bytes and a half-full table per block however many near engines have it (26 to 52 bytes in all), 8 to 16 bytes
per block of a far one. The cached length of a prompt is found by bisection, so that a lookup takes about as long for 1024 blocks
as for 64; a far engine adds 11 microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trireme.hashing import unpacked_keys
from trireme.transport.wire.messages import KVEvents

MAX_FILL = 0.6  # of the table
LEAST_SLOTS = 1024
MAX_SLOTS = 1 << 25  # 512 MiB with up to 64 engines; blocks beyond it are not indexed
MAX_ENGINE_BLOCKS = 1 << 24
NUM_HASHES = 4  # of a Bloom filter
COUNTERS_PER_BLOCK = 8  # at least: the false-positive rate is about 2.4 %
STUCK = 255  # a saturated counter is never decremented
WORD = 64

Keys = NDArray[np.uint64]


class Table:
    """Open-addressing table from keys to bit masks of engines. Updates are batched, lookups single.

    A key that no engine has any more stays as a tombstone until the table is rebuilt.
    """

    def __init__(self, num_engines: int) -> None:
        self.num_words = -(-num_engines // WORD)
        self.num_used = 0  # slots taken, tombstones included
        self._resize(LEAST_SLOTS)

    @property
    def num_bytes(self) -> int:
        return int(self._keys.nbytes + self._owners.nbytes)

    def __len__(self) -> int:
        """Keys that some engine has."""
        return int(self._owners.any(axis=1).sum())

    def add(self, engine: int, keys: Keys) -> None:
        """Adds the keys of `engine`, rebuilding when MAX_FILL is exceeded. Keys that do not fit into MAX_SLOTS are dropped."""
        while len(keys):
            part, keys = np.split(keys, [len(self._keys) // 4])  # fits after a rebuild, however few entries that frees
            if self.num_used + len(part) > MAX_FILL * len(self._keys):
                self._rebuild()
            slots = self._place(part)
            self._owners[slots[slots >= 0], engine // WORD] |= _bit(engine)

    def discard(self, engine: int, keys: Keys) -> None:
        slots = self._find(keys)
        self._owners[slots[slots >= 0], engine // WORD] &= ~_bit(engine)

    def forget(self, engine: int) -> None:
        self._owners[:, engine // WORD] &= ~_bit(engine)

    def owners(self, key: int) -> int:
        """The engines that have it, as a bit mask."""
        keys, last = self._key_at, self._last
        at = key & last
        while (there := keys[at]) != key:
            if not there:
                return 0
            at = at + 1 & last
        if self.num_words == 1:
            return self._word_at[at]
        at *= self.num_words
        return sum(self._word_at[at + i] << WORD * i for i in range(self.num_words))

    def _find(self, keys: Keys) -> NDArray[np.int64]:
        """The slot of each key, or -1."""
        found = np.full(len(keys), -1, np.int64)
        todo = np.arange(len(keys))
        at = (keys & self._mask).astype(np.int64)
        while todo.size:
            there = self._keys[at]
            is_hit = there == keys[todo]
            found[todo[is_hit]] = at[is_hit]
            goes_on = ~is_hit & (there != 0)
            todo, at = todo[goes_on], at[goes_on] + 1 & int(self._mask)
        return found

    def _place(self, keys: Keys) -> NDArray[np.int64]:
        """The slot of each key, allocated if it has none yet; -1 when the table cannot grow any more."""
        found = self._find(keys)
        fresh = np.unique(keys[found < 0])
        if self.num_used + fresh.size > MAX_FILL * len(self._keys):
            return found
        self.num_used += fresh.size
        at = (fresh & self._mask).astype(np.int64)
        while fresh.size:
            free = self._keys[at] == 0
            self._keys[at[free]] = fresh[free]
            is_left = self._keys[at] != fresh  # taken before, or by another key of this batch
            fresh, at = fresh[is_left], at[is_left] + 1 & int(self._mask)
        return self._find(keys)

    def _rebuild(self) -> None:
        """Drops the tombstones; doubles the table if it is still more than half of its maximum fill."""
        is_live = self._owners.any(axis=1)
        keys, owners = self._keys[is_live], self._owners[is_live]
        num_slots = len(self._keys)
        if len(keys) > MAX_FILL / 2 * num_slots:
            num_slots = min(2 * num_slots, MAX_SLOTS)
        self._resize(num_slots)
        self.num_used = 0
        self._owners[self._place(keys)] = owners

    def _resize(self, num_slots: int) -> None:
        self._keys: Keys = np.zeros(num_slots, np.uint64)
        self._owners: Keys = np.zeros((num_slots, self.num_words), np.uint64)
        self._mask = np.uint64(num_slots - 1)
        # the same memory as a flat view: reading one element of an array costs several times as much
        self._key_at, self._word_at, self._last = self._keys.data, self._owners.reshape(-1).data, num_slots - 1


class CountingBloom:
    """Approximate set of the keys of one engine with `num_blocks` blocks: no false negatives, few false positives."""

    def __init__(self, num_blocks: int) -> None:
        num_counters = 1 << (COUNTERS_PER_BLOCK * max(1, num_blocks) - 1).bit_length()
        self._counters = np.zeros(num_counters, np.uint8)

    @property
    def num_bytes(self) -> int:
        return int(self._counters.nbytes)

    def add(self, keys: Keys) -> None:
        places, times = np.unique(self._places(keys), return_counts=True)
        self._counters[places] = np.minimum(self._counters[places] + times, STUCK)

    def discard(self, keys: Keys) -> None:
        """Removes keys, which must have been added before."""
        places, times = np.unique(self._places(keys), return_counts=True)
        counts = self._counters[places].astype(np.int64)
        self._counters[places] = np.where(counts == STUCK, STUCK, np.maximum(counts - times, 0))

    def depth(self, keys: Keys) -> int:
        """How many leading keys are present without a gap."""
        missing = (self._counters[self._places(keys)] == 0).any(axis=1).nonzero()[0]
        return int(missing[0]) if missing.size else len(keys)

    def _places(self, keys: Keys) -> NDArray[np.int64]:
        first, step = keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32) | np.uint64(1)
        rounds = np.arange(NUM_HASHES, dtype=np.uint64)
        places = first[:, None] + step[:, None] * rounds & np.uint64(len(self._counters) - 1)
        return places.astype(np.int64)


class Match:
    """How much of one prompt each engine has cached, in blocks. An engine that has a block has those before it: engines report
    complete prefixes and evict from the end. Where one is missing all the same, an engine may seem to have more than it has."""

    __slots__ = ("_bits", "_far", "_keys", "_seen", "_table")

    def __init__(self, keys: Keys, table: Table, far: dict[int, int], bits: dict[int, int]) -> None:
        self._keys = keys
        self._table = table
        self._far = far
        self._bits = bits
        self._seen: dict[int, int] = {}  # position -> engines that have that block

    def depth(self, engine: int) -> int:
        if (bit := self._bits.get(engine)) is None:
            return self._far.get(engine, 0)
        return self._depth(1 << bit)

    def owners(self, engines: Sequence[int]) -> list[int]:
        """The engines of `engines` with the longest match; empty when none has any."""
        bits, far = self._bits, self._far
        near = self._depth(sum([1 << bits[engine] for engine in engines if engine in bits]))
        most = max(near, max([far.get(engine, 0) for engine in engines], default=0)) if far else near
        if not most:
            return []
        last = self._at(near - 1) if near == most else 0
        return [e for e in engines if (last >> bits[e] & 1 if e in bits else far.get(e, 0) == most)]

    def _depth(self, mask: int) -> int:
        """The longest prefix, in blocks, that some engine in `mask` has."""
        count = len(self._keys)
        if not count or not self._at(0) & mask:
            return 0
        if self._at(count - 1) & mask:
            return count
        known, beyond = 1, count - 1
        while known < beyond:
            middle = (known + beyond) // 2
            if self._at(middle) & mask:
                known = middle + 1
            else:
                beyond = middle
        return known

    def _at(self, position: int) -> int:
        found = self._seen.get(position)
        if found is None:
            found = self._seen[position] = self._table.owners(self._keys.item(position))
        return found


@dataclass(slots=True)
class _Known:
    """The state of one engine's reports. `is_whole`: none is missing since the last reset."""

    epoch: int = -1
    seq: int = 0
    is_whole: bool = False
    bloom: CountingBloom | None = None


class PrefixIndex:
    """Block keys of all engines, from their reports. `far` engines get a Bloom filter each, the others share the table."""

    def __init__(self, num_engines: int, far: Iterable[int] = ()) -> None:
        far = frozenset(far)
        near = [engine for engine in range(num_engines) if engine not in far]
        self._bits = {engine: bit for bit, engine in enumerate(near)}
        self._table = Table(max(1, len(near)))
        self._known = [_Known() for _ in range(num_engines)]
        self._has_far = bool(far)
        self.num_gaps = 0

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes + sum(known.bloom.num_bytes for known in self._known if known.bloom)

    @property
    def num_keys(self) -> int:
        """Keys of the near engines."""
        return len(self._table)

    def apply(self, events: KVEvents) -> bool:
        """Applies a report. False when an earlier one is missing: the engine must report all its blocks again."""
        known = self._known[events.engine]
        if events.reset:
            self.forget(events.engine)
            known.epoch, known.is_whole = events.epoch, True
            if events.engine not in self._bits:
                known.bloom = CountingBloom(min(events.num_blocks, MAX_ENGINE_BLOCKS))
        elif not known.is_whole or (events.epoch, events.seq) != (known.epoch, known.seq + 1):
            self.num_gaps += known.is_whole
            self.forget(events.engine)
            return False
        known.seq = events.seq
        stored, removed = unpacked_keys(events.stored), unpacked_keys(events.removed)
        if known.bloom is not None:
            known.bloom.discard(removed)
            known.bloom.add(stored)
        else:
            bit = self._bits[events.engine]
            self._table.discard(bit, removed)
            self._table.add(bit, stored)
        return True

    def forget(self, engine: int) -> None:
        """Drops what is known of an engine that is gone or whose reports are incomplete."""
        known = self._known[engine]
        if known.is_whole and engine in self._bits:
            self._table.forget(self._bits[engine])
        known.is_whole, known.bloom = False, None

    def match(self, keys: Keys, engines: Iterable[int]) -> Match:
        """How much of a prompt with these block keys each of `engines` has cached."""
        far = {}
        if self._has_far:
            for engine in engines:
                bloom = self._known[engine].bloom
                if bloom is not None:
                    far[engine] = bloom.depth(keys)
        return Match(keys, self._table, far, self._bits)


def _bit(engine: int) -> np.uint64:
    return np.uint64(1 << engine % WORD)

"""The prefix index against plain sets: exact for near engines, never short for far ones; gaps, restarts, growth, size, speed."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit.test_router import burst, coordinator, load
from trireme.coordinator.prefix import STUCK, CountingBloom, PrefixIndex, Table
from trireme.coordinator.router import CACHE_WORTH
from trireme.engine_core.kv.events import BlockLog
from trireme.engine_core.kv.pool import BlockPool
from trireme.hashing import KEY_BYTES, block_hashes, packed_keys, prompt_keys, unpacked_keys
from trireme.topology.zones import Topology
from trireme.transport.wire.messages import MAX_PREFIX, KVEvents, Route


def keys_of(*numbers: int) -> bytes:
    return np.array(numbers, "<u8").tobytes()


def some_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1 << 63, count, dtype=np.uint64)


def told(engine: int, seq: int, stored: bytes = b"", removed: bytes = b"", *, reset: bool = False, epoch: int = 0):
    return KVEvents(engine, epoch, seq, stored, removed, 1000, reset)


# ---------------------------------------------------------------- keys


def test_keys_of_a_prompt_are_those_of_its_blocks_and_bounded() -> None:
    tokens = np.arange(100, dtype=np.int32)
    assert prompt_keys(tokens, 16) == packed_keys(block_hashes(tokens, 16))
    assert prompt_keys(tokens[:96], 16) == packed_keys(block_hashes(tokens[:80], 16)), "one token is always computed"
    assert prompt_keys(tokens, 16, salt=b"x") != prompt_keys(tokens, 16)
    assert len(prompt_keys(tokens, 1, most=7)) == 7 * KEY_BYTES
    assert prompt_keys(tokens[:1], 16) == b""
    assert unpacked_keys(keys_of(0, 5)).tolist() == [1, 5]


@pytest.mark.parametrize("size", [7, KEY_BYTES * (MAX_PREFIX + 1)])
def test_routes_refuse_prefixes_that_are_none(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} bytes"):
        Route(1, 10, prefix=bytes(size))


# ---------------------------------------------------------------- what engines tell


class LogMachine(RuleBasedStateMachine):
    """A pool under any use, its log taken in small pieces at any time: whoever follows the reports knows the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.pool.log = BlockLog(self.pool.index)
        self.held: list[int] = []
        self.reader: set[int] = {99}  # from a former life
        self.seq = 0

    @rule(content=st.integers(0, 9))
    def compute(self, content: int) -> None:
        if self.pool.num_available:
            block = self.pool.take()
            self.pool.seal(block, content.to_bytes(32, "little"))
            self.held.append(block)

    @rule()
    def release(self) -> None:
        if self.held:
            self.pool.release(self.held.pop())

    @rule(content=st.integers(0, 9))
    def invalidate(self, content: int) -> None:
        block = self.pool.find(content.to_bytes(32, "little"))
        if block is not None:
            self.pool.forget(block)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()

    @rule(limit=st.integers(1, 4))
    def report(self, limit: int) -> None:
        assert self.pool.log is not None
        if not self.pool.log.is_due:
            return
        report = self.pool.log.take(0, 0, 6, limit)
        self.seq += 1
        assert report.seq == self.seq
        stored, removed = ({int(k) for k in np.frombuffer(p, "<u8")} for p in (report.stored, report.removed))
        if report.reset:
            self.reader = set()
        assert not stored & self.reader, "nothing is told twice"
        assert removed <= self.reader
        self.reader = self.reader - removed | stored

    @rule()
    def lose_a_report(self) -> None:
        assert self.pool.log is not None
        if self.pool.log.is_due:
            self.pool.log.take(0, 0, 6, 3)
            self.seq += 1
            self.pool.log.restart()

    @invariant()
    def is_bounded(self) -> None:
        assert self.pool.log is not None
        assert len(self.pool.log) <= 2 * 6

    def teardown(self) -> None:
        assert self.pool.log is not None
        while self.pool.log.is_due:
            self.report(2)
        assert self.reader == {int.from_bytes(content[:8], "little") for content in self.pool.index}


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- the index


@given(
    st.lists(st.tuples(st.integers(0, 69), st.booleans(), st.lists(st.integers(1, 40), max_size=12)), max_size=40),
    st.lists(st.integers(1, 40), max_size=20),
)
@settings(max_examples=200, deadline=None)
def test_the_table_equals_sets(changes: list[tuple[int, bool, list[int]]], prompt: list[int]) -> None:
    """70 engines: more than one word of bits."""
    table, model = Table(70), [set[int]() for _ in range(70)]
    for engine, is_stored, keys in changes:
        (table.add if is_stored else table.discard)(engine, np.array(keys, np.uint64))
        model[engine] = model[engine] | set(keys) if is_stored else model[engine] - set(keys)
    for key in prompt:
        assert table.owners(key) == sum(1 << e for e in range(70) if key in model[e])
    assert len(table) == len(set().union(*model))


def owners_of(table: Table, keys: np.ndarray) -> list[int]:
    return [table.owners(key) for key in keys.tolist()]


@given(
    st.lists(st.integers(0, 24), min_size=3, max_size=70),
    st.integers(0, 24),
    st.lists(st.integers(0, 69), max_size=9, unique=True),
)
@settings(max_examples=200, deadline=None)
def test_a_match_equals_a_walk_over_prefixes(depths: list[int], length: int, asked: list[int]) -> None:
    """Engine e has the first depths[e] blocks of a prompt of 24, of which `length` are asked for; some engines are far."""
    prompt, num, far = some_keys(24, 5), len(depths), {1, 2}
    index = PrefixIndex(num, far=far)
    for engine, depth in enumerate(depths):
        index.apply(told(engine, 1, prompt[:depth].tobytes(), reset=True))
    engines = [engine for engine in asked if engine < num]
    match, expected = index.match(prompt[:length], range(num)), [min(depth, length) for depth in depths]
    assert [match.depth(engine) for engine in range(num) if engine not in far] == [
        expected[engine] for engine in range(num) if engine not in far
    ]
    assert all(match.depth(engine) >= expected[engine] for engine in far)
    near = [engine for engine in engines if engine not in far]
    most = max((expected[engine] for engine in near), default=0)
    assert match.owners(near) == [engine for engine in near if most and expected[engine] == most]


def test_a_block_that_is_missing_in_the_middle_costs_a_guess_and_no_more() -> None:
    index, prompt = PrefixIndex(2), some_keys(64)
    index.apply(told(0, 1, np.delete(prompt, 20).tobytes(), reset=True))
    index.apply(told(1, 1, prompt[:10].tobytes(), reset=True))
    match = index.match(prompt, range(2))
    assert match.depth(0) in (20, 64)
    assert match.depth(1) == 10
    assert match.owners([0, 1]) == [0]


def test_a_lookup_looks_at_few_blocks() -> None:
    index, prompt = PrefixIndex(2), some_keys(1024)
    for cached in (0, 1, 500, 1023, 1024):
        index.apply(told(0, 1, prompt[:cached].tobytes(), reset=True))
        match = index.match(prompt, range(2))
        assert (match.depth(0), match.depth(1)) == (cached, 0)
        assert len(match._seen) <= 12


def test_the_table_grows_and_sheds_what_nobody_has() -> None:
    table = Table(4)
    for round_ in range(40):  # a working set of 3 rounds passes through
        table.add(round_ % 4, some_keys(5000, round_))
        if round_ >= 3:
            table.discard((round_ - 3) % 4, some_keys(5000, round_ - 3))
        assert owners_of(table, some_keys(5000, round_)[:64]) == [1 << round_ % 4] * 64
    assert len(table) == 15_000
    assert table.num_bytes <= 15_000 * 16 * 8
    table.forget(39 % 4)
    assert owners_of(table, some_keys(5000, 39)[:4]) == [0] * 4


def test_keys_that_collide_in_their_low_bits_are_all_found() -> None:
    table, keys = Table(2), np.arange(1, 400, dtype=np.uint64) << np.uint64(40)
    table.add(0, keys)
    table.add(1, keys[:100])
    assert owners_of(table, keys) == [3] * 100 + [1] * 299


@given(st.lists(st.sets(st.integers(1, 300), max_size=30), max_size=10), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_a_bloom_filter_never_misses_what_is_there(added: list[set[int]], num_removed: int) -> None:
    """Sets that were added and taken out again leave nothing."""
    bloom, there = CountingBloom(64), set[int]()
    unique = [keys - set().union(*added[:i]) for i, keys in enumerate(added)]
    for keys in unique:
        bloom.add(np.array(sorted(keys), np.uint64))
        there |= keys
    for keys in unique[:num_removed]:
        bloom.discard(np.array(sorted(keys), np.uint64))
        there -= keys
    assert bloom.depth(np.array(sorted(there), np.uint64)) == len(there)
    for keys in unique[num_removed:]:
        bloom.discard(np.array(sorted(keys), np.uint64))
    assert not bloom._counters.any()


def test_a_full_bloom_filter_is_wrong_as_rarely_as_said() -> None:
    bloom = CountingBloom(1 << 13)
    bloom.add(some_keys(1 << 13, 1))
    wrong = sum(bloom.depth(some_keys(1, 1000 + i)) for i in range(4000)) / 4000
    assert wrong <= 0.03


def test_a_stuck_counter_never_falls() -> None:
    bloom, key = CountingBloom(1), np.array([5], np.uint64)
    for _ in range(STUCK + 9):
        bloom.add(key)
    for _ in range(STUCK + 9):
        bloom.discard(key)
    assert bloom.depth(key) == 1


def test_reports_in_order_are_known_and_a_gap_forgets_until_everything_is_told_again() -> None:
    index = PrefixIndex(2, far=[1])
    prompt = unpacked_keys(keys_of(1, 2, 3))
    for engine in (0, 1):
        assert not index.apply(told(engine, 5, keys_of(1))), "the middle of an unknown life"
        assert index.apply(told(engine, 6, keys_of(1, 2), reset=True))
        assert index.apply(told(engine, 7, keys_of(3)))
        assert index.match(prompt, [0, 1]).depth(engine) == 3
        assert index.apply(told(engine, 8, removed=keys_of(3)))
        assert index.match(prompt, [0, 1]).depth(engine) == 2
        assert not index.apply(told(engine, 10, keys_of(3)))
        assert not index.apply(told(engine, 11, keys_of(4)))
        assert index.match(prompt, [0, 1]).depth(engine) == 0
        assert index.apply(told(engine, 12, keys_of(1), reset=True))
        assert index.match(prompt, [0, 1]).depth(engine) == 1
        assert not index.apply(told(engine, 13, keys_of(2), epoch=1)), "another life must begin with a reset"
    assert index.num_gaps == 4


def test_the_longest_owner_wins_wherever_it_is() -> None:
    index = PrefixIndex(4, far=[3])
    index.apply(told(0, 1, keys_of(1, 2), reset=True))
    index.apply(told(1, 1, keys_of(1, 2), reset=True))
    index.apply(told(2, 1, keys_of(1), reset=True))
    index.apply(told(3, 1, keys_of(1, 2, 3), reset=True))
    match = index.match(unpacked_keys(keys_of(1, 2, 3, 4)), range(4))
    assert [match.depth(e) for e in range(4)] == [2, 2, 1, 3]
    assert match.owners([0, 1, 2, 3]) == [3]
    assert match.owners([0, 1, 2]) == [0, 1]
    assert match.owners([2]) == [2]
    assert index.match(unpacked_keys(keys_of(7)), range(4)).owners(range(4)) == []


def test_bytes_for_a_block_are_those_that_the_module_states() -> None:
    index = PrefixIndex(9, far=[8])
    for engine in range(8):
        for seq in range(10):  # half of the blocks are shared by all
            keys = np.concatenate([some_keys(4000, seq), some_keys(4000, 1000 * (engine + 1) + seq)])
            index.apply(KVEvents(engine, 0, seq + 1, keys.tobytes(), b"", 80_000, seq == 0))
    assert index.num_keys == 40_000 + 8 * 40_000
    assert 26 <= index.num_bytes / index.num_keys <= 54
    before = index.num_bytes
    index.apply(KVEvents(8, 0, 1, some_keys(8000).tobytes(), b"", 80_000, True))
    assert 8 <= (index.num_bytes - before) / 80_000 <= 16


def test_a_lookup_costs_microseconds_and_not_more_with_many_blocks() -> None:
    """Processor time, best of several; the bound is far above what is measured (docs)."""
    index = PrefixIndex(64)
    for engine in range(8):
        index.apply(KVEvents(engine, 0, 1, some_keys(8000, engine).tobytes(), b"", 8000, True))
    prompt = some_keys(8000, 3)[:64]

    def once() -> float:
        began = time.thread_time()
        for _ in range(50):
            assert index.match(prompt, range(64)).owners(range(64)) == [3]
        return (time.thread_time() - began) / 50

    assert min(once() for _ in range(5)) < 500e-6


# ---------------------------------------------------------------- the choice


def cached(core, engine: int, tokens: np.ndarray, seq: int = 1) -> None:
    stored = packed_keys(block_hashes(tokens, 16))
    assert core.engine_cached(KVEvents(engine, 0, seq, stored, b"", 1000, seq == 1))


PROMPT = np.arange(1000, dtype=np.int32)


def ask(core, rid: int = 1, tokens: np.ndarray = PROMPT, **fields: object):
    return core.route("f", Route(rid, len(tokens), prefix=prompt_keys(tokens, 16), **fields), 0.0)


@pytest.mark.parametrize("balance", ["prefix", "prefix_least"])
def test_a_prompt_goes_where_it_is_cached(balance: str) -> None:
    core = coordinator(balance=balance)
    cached(core, 2, PROMPT)
    for rid in range(20):
        routed = ask(core, rid)
        assert routed.engine == 2
        core.engine_reported(load(2, seq=rid + 2, admitted={"f": routed.ticket}))


@pytest.mark.parametrize("balance", ["prefix", "prefix_least"])
def test_a_cached_prompt_counts_only_what_is_left_of_it(balance: str) -> None:
    core = coordinator(balance=balance)
    cached(core, 2, PROMPT)
    ask(core)
    assert core.ledger.outstanding(2).num_tokens == 1000 - 62 * 16


@pytest.mark.parametrize("balance", ["prefix", "prefix_least"])
def test_an_owner_that_is_busier_than_its_cache_is_worth_is_left_alone(balance: str) -> None:
    core = coordinator(balance=balance)
    cached(core, 2, PROMPT)
    core.engine_reported(load(2, seq=2, num_running=8, num_waiting=30, waiting_tokens=30_000))
    assert all(ask(core, rid).engine != 2 for rid in range(20))


def test_one_hot_prefix_spreads_when_its_owner_fills_up() -> None:
    core = coordinator(balance="prefix")
    cached(core, 2, PROMPT)
    counts = [ask(core, rid).engine for rid in range(400)]
    assert counts[:8] == [2] * 8
    costs = [core.cost(engine) for engine in range(4)]
    assert max(costs) - min(costs) < CACHE_WORTH * 992 + 1100
    assert max(costs[:2] + costs[3:]) - min(costs) < 2500 < min(costs), "the others' work is even"
    assert min(counts.count(engine) for engine in range(4)) >= 5


@pytest.mark.parametrize(("balance", "least", "most"), [("prefix", 80, 120), ("prefix_least", 99, 101)])
def test_bursts_without_cached_prefixes_spread_as_ever(balance: str, least: int, most: int) -> None:
    for seed in range(10):
        counts = burst(coordinator(balance=balance, seed=seed), 400)
        assert all(least <= counts[engine] <= most for engine in range(4)), counts


def test_a_dead_owner_is_forgotten_with_its_cache() -> None:
    core = coordinator(balance="prefix")
    cached(core, 2, PROMPT)
    core.engine_lost(2, 0, "killed")
    assert ask(core).engine != 2
    core.engine_connected(2, 1)
    core.engine_reported(load(2, epoch=1))
    assert core.engine_cached(KVEvents(2, 0, 2, keys_of(1), b"", 10)), "of the former life: ignored"
    assert not core.engine_cached(KVEvents(2, 1, 7, keys_of(1), b"", 10)), "of this life, not from its start"
    assert core.prefixes.num_keys == 0


def test_a_far_owner_is_found_when_the_near_ones_are_full() -> None:
    core = coordinator(balance="prefix", fleet=Topology(labels=("a", "a", "b", "b")))
    cached(core, 3, PROMPT)
    assert ask(core, label="a").engine in (0, 1)
    for engine in (0, 1):
        core.engine_reported(load(engine, seq=2, num_waiting=20, waiting_tokens=9000))
    assert ask(core, label="a").engine == 3
    assert ask(core, label="b").engine == 3


def test_random_reports_never_break_the_index() -> None:
    """A wild engine can fill the index with nonsense, not the process."""
    rng, index = random.Random(1), PrefixIndex(2, far=[1])
    for seq in range(300):
        noise, is_reset = rng.randbytes(8 * rng.randrange(64)), rng.random() < 0.2
        index.apply(KVEvents(rng.randrange(2), 0, seq, noise, noise[:32], rng.randrange(-5, 99), is_reset))
    assert index.match(unpacked_keys(rng.randbytes(80)), range(2)).owners(range(2)) in ([], [0], [1], [0, 1])

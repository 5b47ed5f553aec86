"""Which sizes are captured: bounds hold and coverage stays whatever comes, a steady load comes to rest, another one is followed."""

from __future__ import annotations

import random
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.errors import ConfigError
from trireme.machine.graph_sizes import GraphSizes, graph_sizes
from trireme.workers.cuda.graph_policy import LEAST_STEPS, MARGIN, WINDOW, Change, GraphPolicy, Size
from trireme.workers.cuda.graph_sizes import (
    MOST_GRAPHS,
    decode_policy,
    first_sizes,
    fixed,
    mixed_policy,
    mixed_sizes,
    sizes_up_to,
)

AUTO = GraphSizes(adapts=True)


def holds(size: Size, shape: Size) -> bool:
    return all(a >= b for a, b in zip(size, shape, strict=True))


def act(policy: GraphPolicy, change: Change | None, held: int | None = None) -> None:
    """What a worker does."""
    if change is None:
        return
    if change.drop is not None:
        policy.drop(change.drop, held=None if change.add else held)
    if change.add is not None:
        policy.add(change.add)


def serve(policy: GraphPolicy, shapes: list[Size], steps: int, every: int = 97) -> list[Change]:
    """`steps` of a load that goes round `shapes`, with an order now and then; the changes made."""
    made = []
    for i, shape in enumerate(islice(cycle(shapes), steps)):
        policy.note(shape)
        if i % every == 0 and (change := policy.change()) is not None:
            made.append(change)
            act(policy, change)
    return made


@st.composite
def policies(draw: st.DrawFn) -> GraphPolicy:
    """The real ones over batches of any size, with less room than they have, and others."""
    kind = draw(st.sampled_from(["decode", "mixed", "any"]))
    rows = draw(st.integers(1, 300))
    if kind == "decode":
        return decode_policy(AUTO, rows)
    if kind == "mixed":
        return mixed_policy(AUTO, rows, draw(st.integers(1, 900)))
    size = st.tuples(st.integers(0, 9), st.integers(1, 9))
    first, grid = draw(st.lists(size, max_size=6)), draw(st.lists(size, max_size=20))
    return GraphPolicy(first, grid, most=draw(st.integers(0, 8)))


@settings(deadline=None, max_examples=150)
@given(policies(), st.integers(0, 2**32), st.integers(0, 60))
def test_the_bound_and_what_is_covered_hold_whatever_comes(policy: GraphPolicy, seed: int, room: int) -> None:
    """Every shape that could be padded at first can be at any time, to the cheapest captured size that holds it."""
    rng = random.Random(seed)
    first, most = policy.captured, policy.most
    kept, widest = policy.kept, max((max(size) for size in policy.grid), default=3)
    wide = [1 if len(first) == 0 else 0] * (len(first[0]) if first else 1)
    held = 10 * len(first)
    bound = held + room
    for _ in range(60):
        hot = [tuple(rng.randint(at, widest + 2) for at in wide) for _ in range(rng.randint(1, 3))]
        for _ in range(rng.randint(1, 4) * LEAST_STEPS):
            policy.note(rng.choice(hot))
        least = rng.choice([0, 0, 5000])
        change = policy.change(held, 10, bound, least_gain=least)
        assert policy.change(held, 10, bound, least_gain=least) == change, "asking changes nothing"
        if change is not None and change.add is not None:
            assert change.add not in policy.captured
            assert change.gain > least
        act(policy, change, held)
        held = 10 * len(policy.captured)
        captured = policy.captured
        assert len(captured) <= most
        assert held <= bound
        assert kept <= set(captured)
        for shape in [*hot, *first, *captured]:
            fits = [size for size in captured if holds(size, shape)]
            assert policy.fit(shape) == min(fits, key=lambda size: (sum(size), size), default=None)
            assert bool(fits) == any(holds(size, shape) for size in first)


@settings(deadline=None, max_examples=80)
@given(policies(), st.data())
def test_a_steady_load_comes_to_rest(policy: GraphPolicy, data: st.DataObject) -> None:
    """And then nothing that would have been worth it is left, but for want of room."""
    if not policy.captured:
        return
    widest = policy.captured[-1]
    shape = st.tuples(*(st.integers(min(1, most), most) for most in widest))
    shapes = data.draw(st.lists(shape, min_size=1, max_size=12))
    every = data.draw(st.integers(10, 300))
    made = serve(policy, shapes, 16 * WINDOW, every)
    assert len(made) <= 2 * len(policy.grid)
    assert serve(policy, shapes, 5 * WINDOW, every) == []
    if len(policy.captured) < policy.most and len(shapes) == 1 and policy.fit(shapes[0]) is not None:
        best = min((size for size in policy.grid if holds(size, shapes[0])), key=sum)
        used = policy.fit(shapes[0])
        assert used is not None
        assert sum(used) - sum(best) <= sum(used) / 50


def test_a_load_that_shifts_is_followed() -> None:
    policy = decode_policy(AUTO, 256)
    assert policy.fit((40,)) == (64,)
    assert [change.add for change in serve(policy, [(37,)], WINDOW)] == [(40,)]
    assert policy.fit((37,)) == (40,)
    assert (200,) not in policy.captured
    added = [change.add for change in serve(policy, [(200,), (90,)], 6 * WINDOW)]
    assert added == [(208,), (96,)]
    assert policy.fit((33,)) == (40,), "there is room for both"


def test_without_room_the_size_used_longest_ago_goes() -> None:
    policy = GraphPolicy([(1,), (64,)], [(n,) for n in range(1, 65)], most=4)
    assert [change.add for change in serve(policy, [(20,), (30,)], 2 * WINDOW)] == [(30,), (20,)]
    serve(policy, [(30,)], 10)
    made = serve(policy, [(40,)], 2 * WINDOW)
    assert made == [Change((40,), (20,), made[0].gain)]
    made = serve(policy, [(50,), (40,)], 4 * WINDOW)
    assert [(change.add, change.drop) for change in made] == [((50,), (30,))]
    assert policy.captured == [(1,), (40,), (50,), (64,)]


def test_a_size_in_use_goes_only_for_one_that_saves_more() -> None:
    policy = GraphPolicy([(1,), (64,)], [(20,), (30,)], most=3)
    serve(policy, [(30,)], WINDOW)
    assert policy.captured == [(1,), (30,), (64,)]
    steps = [(30,)] * 10 + [(20,)] * 34  # 10 rows of each of these against 34 of each of those
    assert serve(policy, steps, 12 * WINDOW) == []
    steps = [(30,)] * 10 + [(20,)] * 2 * 34 * MARGIN
    assert [(change.add, change.drop) for change in serve(policy, steps, 12 * WINDOW)] == [((20,), (30,))]


def test_few_steps_or_little_padding_are_no_reason() -> None:
    policy = decode_policy(AUTO, 256)
    for _ in range(LEAST_STEPS - 1):
        policy.note((40,))
    assert policy.change() is None
    policy.note((40,))
    assert policy.change() == Change((40,), None, LEAST_STEPS * 24)
    for _ in range(5000):
        policy.note((256,))
    assert policy.change() is None


def test_while_requests_wait_a_size_must_be_worth_its_price() -> None:
    policy = decode_policy(AUTO, 256)
    for _ in range(200):
        policy.note((40,))
    assert policy.change(least_gain=200 * 24) is None
    assert policy.change(least_gain=200 * 24 - 1) == Change((40,), None, 200 * 24)


def test_memory_is_given_back_as_long_as_that_helps() -> None:
    policy = decode_policy(AUTO, 64)
    for _ in range(100):
        policy.note((40,))
    assert policy.change(90, 20, 100) is None, "the next one may not fit"
    first = policy.change(140, 20, 100)
    assert first == Change(None, (32,), 0)
    act(policy, first, 140)
    second = policy.change(120, 20, 100)
    assert second == Change(None, (16,), 0)
    act(policy, second, 120)
    assert policy.change(120, 20, 100) is None, "the last one gave nothing back"
    assert policy.captured == [(1,), (2,), (4,), (8,), (64,)]


def test_what_is_kept_is_never_given_back() -> None:
    policy = mixed_policy(AUTO, 256, 300)
    held = 1000
    while (change := policy.change(held, 10, 1)) is not None:
        act(policy, change, held)
        held -= 1
    largest = {(0, 256), (8, 248), (16, 240), (32, 224), (64, 192), (128, 128), (256, 32)}
    assert set(policy.captured) == policy.kept == {(0, 32), *largest}


def test_what_was_seen_long_ago_counts_no_more() -> None:
    policy = decode_policy(AUTO, 256)
    for _ in range(4000):
        policy.note((40,))
    for _ in range(40 * WINDOW):
        policy.note((1,))
    assert policy.change() is None


def test_named_sizes_stay() -> None:
    policy = decode_policy(graph_sizes("8,1,32", 64), 64)
    assert policy.captured == policy.grid == [(1,), (8,), (32,)]
    assert serve(policy, [(5,), (20,)], 4 * WINDOW) == []
    assert policy.fit((33,)) is None
    assert fixed(()).fit((1,)) is None
    assert decode_policy(graph_sizes("none", 64), 64).captured == []
    assert mixed_policy(graph_sizes("none", 64), 64, 8192).captured == []
    mixed = mixed_policy(graph_sizes("1,8,32", 64), 64, 8192)
    assert {rows for rows, _ in mixed.captured} == {0, 8, 16, 32}


@pytest.mark.parametrize("asked", ["", "0", "65", "8,", "8,-1", "eight", "1" * 30, "٣", ",".join(["1"] * 65), "all"])
def test_other_words_are_refused_by_name(asked: str) -> None:
    with pytest.raises(ConfigError, match="--graph-sizes"):
        graph_sizes(asked, 64)


def test_few_sizes_at_the_start_hold_all_that_many_do() -> None:
    for rows in (1, 3, 8, 64, 100, 256, 512, 4096):
        policy = decode_policy(AUTO, rows)
        assert [size for (size,) in policy.captured] == first_sizes(rows)
        assert {size for (size,) in policy.grid} == {*sizes_up_to(rows), *first_sizes(rows)}
        assert policy.captured[-1] == (min(rows, 512),)
        assert len(policy.captured) <= 11
        assert policy.most <= MOST_GRAPHS
        for count in range(1, min(rows, 512) + 1):
            used = policy.fit((count,))
            assert used is not None
            assert used[0] < 2 * count or used == (1,)
        mixed = mixed_policy(AUTO, rows, 8192)
        assert set(mixed.captured) == set(mixed_sizes(rows, 8192))

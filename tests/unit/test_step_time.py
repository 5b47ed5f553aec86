"""The model of step times: what it predicts after what it has seen, and how fast it follows a change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.metrics import percentile
from trireme.step_time import StepCosts, StepShape, StepTimeModel

CPU = StepCosts(step_s=0.008, token_s=0.0007, context_s=2e-7, pair_s=3e-7)


def gpu_seconds(shape: StepShape) -> float:
    """Weights are read or tokens computed, whichever takes longer; prompts are not in a captured graph."""
    tokens = shape.rows + shape.prompt
    seconds = max(0.0035 + 0.00003 * shape.rows, 25e-6 * tokens) + 0.0005
    return seconds + 2.7e-8 * shape.context + 1.3e-9 * shape.pairs + (0.001 if shape.prompt else 0.0)


def mixed(seconds_of: object, count: int = 600, seed: int = 1, noise: float = 0.04) -> list[tuple[StepShape, float]]:
    """Steps of 0..32 sequences, some with one or two chunks; one in fifty is up to four times too slow."""
    rng, steps = random.Random(seed), []
    while len(steps) < count:
        rows = rng.choice([0, 1, 2, 4, 8, 16, 24, 32])
        shape = StepShape(rows, rows * rng.randrange(100, 3000))
        for _ in range(rng.choice([0, 0, 1, 2]) if rows else 1):
            shape = shape.plus(int(2 ** rng.uniform(3, 9)), rng.randrange(4000))
        factor = rng.gauss(1.0, noise) if rng.random() > 0.02 else rng.uniform(1, 4)
        steps.append((shape, seconds_of(shape) * max(0.5, factor)))  # type: ignore[operator]
    return steps


def relative_errors(model: StepTimeModel, steps: Sequence[tuple[StepShape, float]]) -> list[float]:
    """Of predictions made before each step while the model learns from them in order."""
    found = []
    for shape, seconds in steps:
        expected = model.seconds(shape)
        if expected:
            found.append(abs(expected - seconds) / seconds)
        model.observe(shape, seconds)
    return found


def test_a_shape_adds_up() -> None:
    shape = StepShape(3, 300).plus(100, 0).plus(10, 500)
    assert shape == StepShape(3, 300, 110, 100 * 50 + 10 * 505)
    assert StepCosts(1.0, 0.5, 0.25, 0.125).seconds(shape) == 1 + 0.5 * 113 + 0.25 * 300 + 0.125 * 10050


def test_nothing_is_known_at_first() -> None:
    model = StepTimeModel()
    assert model.seconds(StepShape(4, 100)) == model.decode_seconds(StepShape(4, 100)) == 0.0
    assert model.room(StepShape(4, 100), 0, 1.0, 512) == 0
    assert model.errors() == (0.0, 0.0)


@pytest.mark.parametrize("seconds_of", [CPU.seconds, gpu_seconds], ids=["cpu", "gpu"])
def test_predictions_are_within_a_tenth_of_mixed_steps(seconds_of: object) -> None:
    errors = relative_errors(StepTimeModel(), mixed(seconds_of, 2000))[100:]
    assert percentile(errors, 50) <= 0.10
    assert percentile(errors, 95) <= 0.25


def test_it_follows_a_machine_at_half_its_speed_within_two_seconds() -> None:
    model = StepTimeModel()
    relative_errors(model, mixed(CPU.seconds, 500))
    shape, passed_s = StepShape(8, 8000).plus(64, 100), 0.0
    while abs(model.seconds(shape) / (2 * CPU.seconds(shape)) - 1) > 0.15:
        passed_s += 2 * CPU.seconds(shape)
        model.observe(shape, 2 * CPU.seconds(shape))
    assert passed_s < 2.0
    other = StepShape(2, 500).plus(200, 0)  # and so does what has not been seen since
    assert model.seconds(other) == pytest.approx(2 * CPU.seconds(other), rel=0.25)


def test_one_slow_step_changes_little() -> None:
    model = StepTimeModel()
    relative_errors(model, mixed(CPU.seconds, 500, noise=0.01))
    shape = StepShape(8, 8000).plus(64, 100)
    before = model.seconds(shape)
    model.observe(shape, 20 * before)
    assert model.seconds(shape) == pytest.approx(before, rel=0.1)


def test_room_is_the_most_that_fits() -> None:
    model = StepTimeModel()
    relative_errors(model, mixed(CPU.seconds, 1000, noise=0.0))
    shape = StepShape(8, 8000)
    for bound_s in (0.03, 0.06, 0.12):
        room = model.room(shape, 300, bound_s, 4096)
        assert model.seconds(shape.plus(room, 300)) <= bound_s < model.seconds(shape.plus(room + room // 16 + 2, 300))
    assert model.room(shape, 300, 1e-9, 4096) == 0
    assert model.room(shape, 300, 1e9, 100) == 100


def test_sizes_grow_by_steps_of_two_while_they_are_unknown() -> None:
    model = StepTimeModel()
    model.observe(StepShape().plus(32, 0), 0.02)
    assert model.room(StepShape(2, 50), 0, 1e9, 4096) == 2 * 32 - 2


def test_a_first_step_of_minutes_does_no_harm() -> None:
    """It may have compiled something; the engine must survive whatever it measures after it."""
    model = StepTimeModel()
    model.observe(StepShape(1, 10), 200.0)
    model.observe(StepShape(1, 10).plus(512, 0), 300.0)
    for _ in range(300):
        model.observe(StepShape(1, 10), 1e-5)
        model.observe(StepShape(1, 10).plus(512, 0), 1e-3)
    assert model.seconds(StepShape(1, 10)) == pytest.approx(1e-5, rel=0.5)
    assert model.seconds(StepShape(1, 10).plus(512, 0)) == pytest.approx(1e-3, rel=0.5)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 300),
            st.integers(0, 4096),
            st.integers(0, 131072),
            st.floats(1e-6, 1000.0),
            st.integers(1, 9),
        ),
        max_size=40,
    )
)
def test_any_history_gives_finite_positive_times(history: list[tuple[int, int, int, float, int]]) -> None:
    model = StepTimeModel()
    for rows, prompt, start, seconds, times in history:
        shape = StepShape(rows, rows * start)
        for _ in range(times):
            model.observe(shape.plus(prompt, start) if prompt else shape, seconds)
        assert 0.0 <= model.margin <= 0.2
        assert 0.0 < model.level < 1e9
        assert 0.0 <= model.decode_seconds(StepShape(5, 500)) < 1e12
        assert 0 <= model.room(StepShape(5, 500), 10, 0.05, 1000) <= 1000


def test_what_is_not_known_yet_counts_as_slow() -> None:
    """The first steps at the start of prompts say nothing about chunks behind a long context."""
    model = StepTimeModel()
    for tokens in (128, 256, 512, 1024) * 4:
        model.observe(StepShape(16, 2000).plus(tokens, 0), 0.005 + 2e-5 * tokens)
    near, deep = StepShape(16, 2000).plus(512, 0), StepShape(16, 2000).plus(512, 30_000)
    assert model.cautious_seconds(near) < 1.2 * model.seconds(near)
    assert model.cautious_seconds(deep) > 1.2 * model.seconds(deep)
    before = model.room(StepShape(16, 2000), 30_000, 0.030, 4096)
    for _ in range(30):
        model.observe(deep, model.seconds(near))
    assert model.cautious_seconds(deep) < 1.1 * model.seconds(deep)
    assert model.room(StepShape(16, 2000), 30_000, 0.030, 4096) > 1.2 * before


def test_a_host_that_stands_still_for_a_step_costs_no_margin() -> None:
    """One step looks long and the next one instant; smaller chunks would not have helped."""
    model = StepTimeModel()
    shape = StepShape(16, 2000).plus(256, 0)
    for i in range(200):
        model.observe(shape, 0.010 * (1.005 if i % 2 else 0.995))
    settled = model.margin
    assert settled < 0.05
    model.observe(shape, 0.030)
    model.observe(shape, 0.0005)
    assert model.margin < settled + 0.05
    assert model.seconds(shape) == pytest.approx(0.010, rel=0.1)
    for i in range(100):  # but steps that are often off are kept away from
        model.observe(shape, 0.010 * (1.3 if i % 2 else 0.7))
    assert model.margin > 0.15

"""Progress judged by steps: honest long steps are no stall, whatever their sizes; what stands still is told and given up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.engine_core.stall import FIRST_STEP_S, LostTime, StallWatch, StepTimes

TIMEOUT_S = 15.0


def watch_of(*steps: tuple[int, float]) -> StallWatch:
    times = StepTimes()
    for num_tokens, seconds in steps:
        times.note(num_tokens, seconds)
    return StallWatch(times, TIMEOUT_S)


def look(
    watch: StallWatch,
    start: float,
    end: float,
    step: tuple[int, float, int] | None,
    *,
    has_work: bool = True,
    halted: str = "",
) -> None:
    """Looks as often as the loop does."""
    now = start
    while now < end:
        watch.look(now, step, has_work=has_work, halted=halted)
        now += 0.5
    watch.look(end, step, has_work=has_work, halted=halted)


@settings(deadline=None)
@given(
    base=st.floats(0.0, 5.0),
    per_token=st.floats(1e-5, 0.1),
    noise=st.lists(st.floats(0.5, 1.4), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=12),
)
def test_an_honest_step_is_never_late(base: float, per_token: float, noise: list[float], sizes: list[int]) -> None:
    """Steps that cost what a machine costs, up to 2.8 times more one time than another."""
    times = StepTimes()
    watch, now = StallWatch(times, TIMEOUT_S), 100.0
    for i, num_tokens in enumerate(sizes):
        seconds = (base + per_token * num_tokens) * noise[i % len(noise)]
        look(watch, now, now + seconds, (i, now, num_tokens))
        assert watch.stalled == ""
        assert not watch.stuck or (i == 0 and seconds > FIRST_STEP_S)
        now += seconds
        times.note(num_tokens, seconds)


@given(st.lists(st.floats(0.001, 0.15), min_size=1), st.integers(1, 64))
def test_a_step_that_stands_still_is_late_within_a_second_and_given_up_later(
    history: list[float], num_tokens: int
) -> None:
    watch = watch_of(*((num_tokens, seconds) for seconds in history))
    look(watch, 100.0, 101.01, (7, 100.0, num_tokens))
    assert "step 7 has run for 1.0 s" in watch.stalled
    assert not watch.stuck
    look(watch, 101.0, 100.0 + TIMEOUT_S + 0.01, (7, 100.0, num_tokens))
    assert "a worker is stuck" in watch.stuck
    look(watch, 116.0, 116.1, (8, 116.0, num_tokens))
    assert (watch.stalled, watch.stuck) == ("", "")


def test_the_first_step_has_nothing_to_be_compared_with() -> None:
    watch = watch_of()
    look(watch, 100.0, 100.0 + FIRST_STEP_S - 1, (1, 100.0, 256))
    assert (watch.stalled, watch.stuck) == ("", "")
    look(watch, 100.0 + FIRST_STEP_S - 1, 100.0 + FIRST_STEP_S + 1, (1, 100.0, 256))
    assert watch.stuck


def test_long_steps_have_long_patience() -> None:
    watch = watch_of((256, 20.0))
    look(watch, 100.0, 159.0, (2, 100.0, 256))
    assert (watch.stalled, watch.stuck) == ("", "")
    look(watch, 159.0, 161.0, (2, 100.0, 256))
    assert watch.stalled
    assert watch.stuck


def test_a_step_of_a_new_size_is_judged_by_the_nearest_one() -> None:
    watch = watch_of((1, 0.05))
    look(watch, 100.0, 130.0, (2, 100.0, 256))
    assert not watch.stalled  # 256 times as long, and three times that
    watch = watch_of((256, 2.0))
    look(watch, 100.0, 105.9, (2, 100.0, 1))
    assert not watch.stalled
    look(watch, 105.9, 106.1, (2, 100.0, 1))
    assert watch.stalled


def test_a_stopped_worker_is_told_at_once_with_or_without_work() -> None:
    watch = watch_of((1, 5.0))
    look(watch, 100.0, 100.1, None, has_work=False)
    look(watch, 100.2, 100.2, (1, 100.0, 1), halted="worker-1 is stopped")
    assert watch.stalled == "worker-1 is stopped"
    look(watch, 100.3, 110.0, None, has_work=False, halted="worker-1 is stopped")
    assert watch.stalled == "worker-1 is stopped"
    assert not watch.stuck
    look(watch, 110.0, 100.2 + TIMEOUT_S, None, has_work=False, halted="worker-1 is stopped")
    assert watch.stuck


def test_work_without_a_step_is_a_stall() -> None:
    watch = watch_of((1, 0.1))
    look(watch, 99.0, 100.0, None, has_work=False)
    look(watch, 100.0, 100.9, None)
    assert not watch.stalled
    look(watch, 100.9, 101.1, None)
    assert "no step was planned" in watch.stalled
    look(watch, 101.1, 116.0, None)
    assert watch.stuck
    look(watch, 116.1, 116.2, (3, 116.0, 1))
    assert (watch.stalled, watch.stuck) == ("", "")


@pytest.mark.parametrize("step", [(7, 100.0, 1), None])
def test_being_stopped_as_a_whole_counts_against_nobody(step: tuple[int, float, int] | None) -> None:
    watch = watch_of((1, 0.1))
    look(watch, 99.0, 100.2, None, has_work=False)
    look(watch, 160.0, 160.8, step)
    assert (watch.stalled, watch.stuck) == ("", "")
    look(watch, 160.8, 161.2, step)
    assert watch.stalled
    assert not watch.stuck


def test_time_in_which_a_step_could_not_go_on_is_no_usual_step_time() -> None:
    """Frozen as a whole, a worker stopped, workers without a processor: the next step of the size is judged as ever."""
    times = StepTimes()
    watch = StallWatch(times, TIMEOUT_S)
    times.note(1, 0.1)
    look(watch, 99.0, 100.0, None, has_work=False)
    watch.turn(120.1)  # 20 s away
    times.note(1, times.own_s(100.0, 120.1))
    look(watch, 120.1, 121.1, (2, 120.1, 1))
    look(watch, 121.1, 131.1, (2, 120.1, 1), halted="worker-1 is stopped")
    times.note(1, times.own_s(120.1, 131.2))
    for i in range(20):
        watch.look(131.7 + 0.5 * i, (3, 131.2, 1), has_work=True, halted="", starved_s=0.45)
    times.note(1, times.own_s(131.2, 141.2))
    usual_s = times.usual_s(1)
    assert usual_s is not None
    assert usual_s < 1.6
    look(watch, 141.2, 141.2 + TIMEOUT_S + 0.1, (4, 141.2, 1))
    assert "a worker is stuck" in watch.stuck


@pytest.mark.parametrize("share", [0.95, 0.8])
def test_a_step_without_a_processor_is_not_stuck_but_one_that_had_it_is(share: float) -> None:
    """A machine that gives workers a twentieth of a processor takes so much longer, and nobody is ended for that."""
    watch = watch_of((1, 0.4))
    now = 100.0
    while now - 100.0 < 0.4 / (1.0 - share):
        watch.look(now, (2, 100.0, 1), has_work=True, halted="", starved_s=0.5 * share if now > 100.0 else 0.0)
        assert (watch.stalled, watch.stuck) == ("", "")
        now += 0.5
    while now - 100.0 < TIMEOUT_S / (1.0 - share) + 1.0:
        watch.look(now, (2, 100.0, 1), has_work=True, halted="", starved_s=0.5 * share)
        now += 0.5
    assert watch.stuck


def test_lost_time_is_counted_once_and_by_what_it_overlaps_with() -> None:
    lost = LostTime()
    assert lost.since(0.0) == 0.0
    lost.add(10.0, 20.0, 10.0)
    lost.add(18.0, 22.0, 4.0)  # of which two seconds are told already
    assert lost.since(0.0) == pytest.approx(12.0)
    assert lost.since(15.0) == pytest.approx(7.0)
    lost.add(30.0, 40.0, 5.0)
    assert lost.since(25.0) == pytest.approx(5.0)
    assert lost.since(35.0) == pytest.approx(2.5)
    assert lost.since(40.0) == 0.0

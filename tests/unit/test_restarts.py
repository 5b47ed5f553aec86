"""Back-off between restarts: doubles up to a minute, five restarts in ten minutes, then no more."""

from __future__ import annotations

from trireme.launch.processes.restarts import COORDINATOR_LIMITS, RestartLimits, Restarts


def test_back_off_doubles_then_the_part_stays_down() -> None:
    restarts = Restarts(RestartLimits())
    assert [restarts.note_death(float(t)) for t in range(6)] == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert restarts.note_death(10.0) is None


def test_back_off_is_capped() -> None:
    restarts = Restarts(RestartLimits(most=20))
    assert max(d for t in range(20) if (d := restarts.note_death(float(t))) is not None) == 60.0


def test_deaths_far_apart_never_add_up() -> None:
    restarts = Restarts(RestartLimits())
    assert [restarts.note_death(700.0 * i) for i in range(20)] == [1.0] * 20
    assert restarts.num_recent == 1


def test_the_coordinator_is_tried_for_ever_and_at_once_when_it_had_been_well() -> None:
    restarts = Restarts(COORDINATOR_LIMITS)
    assert [restarts.note_death(2.0 * t, ready_s=2.0) for t in range(60)] == [0.05] * 60
    crashes = [restarts.note_death(120.0 + t, ready_s=0.1) for t in range(60)]
    assert crashes[:4] == [0.1, 0.2, 0.4, 0.8]
    assert crashes[-1] == 60.0
    assert restarts.note_death(500.0, ready_s=5.0) == 0.05

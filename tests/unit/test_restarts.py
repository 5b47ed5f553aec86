"""Back-off between restarts: doubles up to a minute, five restarts in ten minutes, then no more."""

from __future__ import annotations

from launch.restarts import RestartLimits, Restarts


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

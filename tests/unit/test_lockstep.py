"""What ranks agree on, and the waves of a rank and of the coordinator, event by event."""

from __future__ import annotations

import pytest

from trireme.coordinator.waves import Waves
from trireme.engine_core.lifecycle.wave import Wave
from trireme.errors import CollectiveError
from trireme.topology.lockstep import Agreed, Ballot, agree
from trireme.transport.wire.messages import WaveOrder, WaveReport


def test_all_take_the_largest_shape_and_the_least_graph() -> None:
    ballots = [Ballot(1, 4, False, False, 0, 2), Ballot(1, 4, True, True, 7, 0), Ballot(1, 4, False, True, 3, 1)]
    assert agree(ballots) == Agreed(has_work=True, is_ready=False, num_tokens=7, graph=0)
    assert agree([ballot._replace(is_ready=True) for ballot in ballots]).is_ready


@pytest.mark.parametrize("other", [Ballot(1, 5, True, True), Ballot(2, 4, True, True)])
def test_ranks_in_different_steps_are_found_out(other: Ballot) -> None:
    with pytest.raises(CollectiveError, match=r"out of step: rank 0 wave 1 step 4, rank 1 wave . step ."):
        agree([Ballot(1, 4, True, True), other])


def test_a_wave_of_two_steps_under_way_ends_one_step_after_it_was_agreed_to() -> None:
    wave = Wave(0, epoch=0, depth=2)
    assert not wave.may_vote
    wave.on_order(WaveOrder(0, 1))
    assert wave.vote(begun=0, queued=1) == Ballot(1, 1, True, False)
    assert wave.vote(begun=1, queued=0) == Ballot(1, 2, True, False)
    assert not wave.may_vote
    wave.on_agreed(Agreed(False, False))
    assert not wave.may_vote
    assert wave.running
    wave.on_agreed(Agreed(True, False))
    assert not wave.running


def test_orders_of_another_life_count_for_nothing() -> None:
    wave = Wave(0, epoch=3)
    assert not wave.on_order(WaveOrder(2, 9, 9, "keep"))
    assert (wave.running, wave.mode) == (False, "")


def test_a_start_held_back_until_both_ranks_have_paused_does_no_harm() -> None:
    """Two ranks, a request at rank 0; its wave's order to rank 1 is late, and a pause comes in between. All four orders."""
    for late in (False, True):
        waves, ranks = Waves(2), [Wave(0, 0), Wave(1, 0)]
        for wave in ranks:
            waves.connected(wave.rank, 0)
            waves.reported(report_of(wave))
        assert waves.orders() == []
        waves.reported(report_of(ranks[0], queued=1))
        start = dict(waves.orders())
        assert start.keys() == {0, 1}
        ranks[0].on_order(start[0])
        number = waves.direct("keep")
        pause = dict(waves.orders())
        ranks[0].on_order(pause[0])
        for order in (pause[1], start[1]) if late else (start[1], pause[1]):
            ranks[1].on_order(order)
        assert not waves.standing(number)  # both run the wave that was ordered first
        agreed = agree([wave.vote(begun=0, queued=1 - wave.rank) for wave in ranks])
        for wave in ranks:
            wave.on_agreed(agreed)
            assert not wave.may_vote
            waves.reported(report_of(wave, queued=1 - wave.rank))
        assert waves.standing(number)
        assert waves.orders() == []
        resumed = waves.direct("")
        for rank, order in waves.orders():
            assert ranks[rank].on_order(order)
            waves.reported(report_of(ranks[rank], queued=1 - rank))
        assert waves.standing(resumed)
        for rank, order in waves.orders():
            ranks[rank].on_order(order)
        assert all(wave.running and wave.wave == 2 for wave in ranks)
        assert ranks[0].vote(begun=0, queued=1).has_work


def report_of(wave: Wave, *, queued: int = 0) -> WaveReport:
    report = wave.report(begun=0, queued=queued)
    assert report is not None
    return report


def test_a_new_coordinator_takes_over_what_ranks_report() -> None:
    waves = Waves(2, serial=1)
    for rank in range(2):
        waves.connected(rank, 5)
    waves.reported(WaveReport(0, 5, wave=7, is_running=True))
    assert waves.orders() == []  # rank 1 has not spoken yet
    waves.reported(WaveReport(1, 5, wave=6, is_running=False, number=3, mode="keep"))
    assert dict(waves.orders()) == {rank: WaveOrder(5, 7, 3, "keep") for rank in range(2)}
    assert not waves.is_parked


def test_a_pause_that_is_taken_back_before_it_stands_says_so() -> None:
    waves = Waves(1)
    waves.connected(0, 0)
    waves.reported(WaveReport(0, 0, 0, False))
    number = waves.direct("wait")
    waves.direct("")
    assert waves.standing(number) is None


def test_a_pause_outlives_the_group_that_it_held() -> None:
    waves = Waves(1)
    waves.connected(0, 0)
    waves.reported(WaveReport(0, 0, 4, False))
    number = waves.direct("keep")
    waves.lost(0, 0)
    waves.connected(0, 1)
    waves.lost(0, 0)  # said late
    waves.reported(WaveReport(0, 0, 4, False))  # so late that another life has begun
    assert not waves.is_complete
    waves.reported(WaveReport(0, 1, 0, False, wants=True))
    assert waves.orders() == [(0, WaveOrder(1, 0, number, "keep"))]

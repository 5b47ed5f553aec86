"""Which way a sum over GPUs goes, and the watch that ends steps that wait for nobody."""

from __future__ import annotations

import pytest

from trireme.workers.collectives.allreduce_algos import (
    AlgoRange,
    AllReduceAlgo,
    algo_of,
    default_steps,
    describe,
    steps_from,
    usable,
)
from trireme.workers.collectives.watchdog import CollectiveWatchdog

K = 1024


def test_the_fastest_way_of_each_size_is_taken() -> None:
    times = {
        8 * K: {AllReduceAlgo.PUSHED: 3.0, AllReduceAlgo.ONE_SHOT: 5.0, AllReduceAlgo.NCCL: 12.0},
        64 * K: {AllReduceAlgo.PUSHED: 5.0, AllReduceAlgo.ONE_SHOT: 5.0, AllReduceAlgo.NCCL: 14.0},
        512 * K: {AllReduceAlgo.PUSHED: 15.0, AllReduceAlgo.ONE_SHOT: 9.0, AllReduceAlgo.NCCL: 20.0},
        8192 * K: {AllReduceAlgo.ONE_SHOT: 90.0, AllReduceAlgo.TWO_SHOT: 80.0, AllReduceAlgo.NCCL: 60.0},
    }
    steps = steps_from(times)
    assert steps == [
        AlgoRange(64 * K, AllReduceAlgo.PUSHED),
        AlgoRange(512 * K, AllReduceAlgo.ONE_SHOT),
        AlgoRange(8192 * K, AllReduceAlgo.NCCL),
    ]
    assert algo_of(steps, 16) is AllReduceAlgo.PUSHED
    assert algo_of(steps, 64 * K) is AllReduceAlgo.PUSHED
    assert algo_of(steps, 64 * K + 16) is AllReduceAlgo.ONE_SHOT
    assert algo_of(steps, 1 << 30) is AllReduceAlgo.NCCL
    assert describe(steps) == "pushed up to 64 KiB, one-shot up to 512 KiB, nccl beyond"


def test_one_way_for_all() -> None:
    assert describe(steps_from({8 * K: {AllReduceAlgo.NCCL: 1.0}, 16 * K: {AllReduceAlgo.NCCL: 2.0}})) == "nccl always"


@pytest.mark.parametrize("has_nccl", [True, False])
def test_without_measuring_small_messages_are_pushed(has_nccl: bool) -> None:
    steps = default_steps(512 * K, 8192 * K, has_peers=True, has_nccl=has_nccl)
    assert [algo_of(steps, size) for size in (16, 8 * K, 512 * K)] == [
        AllReduceAlgo.PUSHED,
        AllReduceAlgo.PUSHED,
        AllReduceAlgo.ONE_SHOT,
    ]
    assert algo_of(steps, 1 << 28) is (AllReduceAlgo.NCCL if has_nccl else AllReduceAlgo.TWO_SHOT)


def test_without_peer_memory_everything_goes_one_way() -> None:
    assert describe(default_steps(512 * K, 8192 * K, has_peers=False, has_nccl=True)) == "nccl always"


def test_ways_have_limits() -> None:
    def of(size: int, **has: bool) -> list[AllReduceAlgo]:
        return usable(size, pushed=64 * K, staged=512 * K, **{"has_peers": True, "has_nccl": True, **has})

    assert of(64 * K) == [AllReduceAlgo.PUSHED, AllReduceAlgo.ONE_SHOT, AllReduceAlgo.TWO_SHOT, AllReduceAlgo.NCCL]
    assert of(128 * K) == [AllReduceAlgo.ONE_SHOT, AllReduceAlgo.TWO_SHOT, AllReduceAlgo.NCCL]
    assert of(1 << 20) == [AllReduceAlgo.NCCL]
    assert of(24, has_nccl=False) == []
    assert of(64, has_peers=False) == [AllReduceAlgo.NCCL]


class Fixture:
    """A watch over a clock that is set by hand."""

    def __init__(self, stuck_s: float = 12.0) -> None:
        self.now, self.trouble, self.aborts = 0.0, "", 0
        self.watch = CollectiveWatchdog(lambda: self.trouble, self.abort, stuck_s=stuck_s, clock=lambda: self.now)

    def abort(self) -> None:
        self.aborts += 1


def test_a_step_that_ends_in_time_is_forgotten() -> None:
    fixture = Fixture()
    number = fixture.watch.begin()
    fixture.now = 11.0
    assert not fixture.watch.look()
    fixture.watch.end(number)
    fixture.now = 100.0
    assert not fixture.watch.look()
    assert (fixture.watch.reason, fixture.aborts) == ("", 0)


def test_a_stuck_step_is_aborted_once() -> None:
    fixture = Fixture()
    fixture.watch.begin(60.0)
    fixture.watch.begin()
    fixture.now = 12.5
    assert fixture.watch.look()
    assert fixture.watch.look()
    assert fixture.aborts == 1
    assert "does not come" in fixture.watch.reason


def test_time_without_a_processor_counts_against_nobody() -> None:
    """Ranks that share a busy machine come later, and they come."""
    fixture = Fixture()
    fixture.watch._starved = lambda now: 0.9
    fixture.watch.begin()
    for fixture.now in range(1, 100):
        assert not fixture.watch.look(), fixture.now
    fixture.watch.begin()  # has not had that time
    fixture.watch._starved = lambda now: 0.0
    fixture.now = 99.0 + 11.5
    late = fixture.watch.look()
    assert late  # the first one, which had its 12 s by then
    fixture = Fixture()
    fixture.watch._starved = lambda now: 30.0 if now < 5.0 else 0.0
    fixture.now = 2.0
    fixture.watch.begin()
    fixture.now = 3.5
    assert not fixture.watch.look()
    number = fixture.watch.begin()
    fixture.now = 15.4
    assert not fixture.watch.look()
    fixture.now = 15.6
    assert fixture.watch.look(), number


def test_what_a_communicator_reports_ends_it_too() -> None:
    fixture = Fixture()
    assert not fixture.watch.look()
    fixture.trouble = "remote process exited"
    assert fixture.watch.look()
    assert (fixture.watch.reason, fixture.aborts) == ("remote process exited", 1)


def test_a_guard_ends_with_its_block() -> None:
    fixture = Fixture()
    with pytest.raises(RuntimeError), fixture.watch.guard(5.0):
        raise RuntimeError
    fixture.now = 1e6
    assert not fixture.watch.look()


def test_the_thread_looks_by_itself() -> None:
    fixture = Fixture()
    fixture.watch.start()
    fixture.watch.begin()
    fixture.now = 13.0
    fixture.watch._thread.join(5.0)
    assert not fixture.watch._thread.is_alive()
    assert fixture.aborts == 1

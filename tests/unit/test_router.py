"""Choice of an engine: bursts spread from the first request on, ties do not herd, pins and absences are respected."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from trireme.config import CoordinatorConfig
from trireme.coordinator.core import Coordinator
from trireme.coordinator.ledger import Outstanding
from trireme.coordinator.members import Members
from trireme.coordinator.router import POLICIES, cost_of
from trireme.settings import table
from trireme.topology.zones import Topology
from trireme.transport.wire.messages import Load, Released, Route


def load(engine: int, *, seq: int = 1, epoch: int = 0, **fields: object) -> Load:
    base: dict[str, object] = {
        "progress": 0, "num_waiting": 0, "num_running": 0, "waiting_tokens": 0, "running_tokens": 0, "blocks_used": 0,
        "num_blocks": 100, "oldest_wait_s": 0.0, "admitted": {}, "finished": 0,
    }  # fmt: skip
    return Load(engine=engine, epoch=epoch, seq=seq, **(base | fields))


def coordinator(
    num_engines: int = 4, balance: str = "p2c", seed: int = 0, epoch: int = 0, fleet: Topology | None = None
) -> Coordinator:
    """Every engine has connected and reported once: idle."""
    core = Coordinator(num_engines, balance, random.Random(seed), epoch=epoch, fleet=fleet)
    for engine in range(num_engines):
        core.engine_connected(engine, 0)
        core.engine_reported(load(engine))
    return core


def burst(core: Coordinator, count: int, tokens: int = 10) -> Counter[int]:
    return Counter(core.route("front-0", Route(rid, tokens), now=0.0).engine for rid in range(count))


@pytest.mark.parametrize("seed", range(25))
def test_o22_first_burst_spreads_before_any_statistics(seed: int) -> None:
    small = burst(coordinator(seed=seed), 8)
    assert max(small.values()) <= 4
    large = burst(coordinator(seed=seed), 400)
    assert all(80 <= large[engine] <= 120 for engine in range(4)), large
    even = burst(coordinator(balance="least", seed=seed), 400)
    assert all(99 <= even[engine] <= 101 for engine in range(4)), even


def test_round_robin_is_exactly_even_and_passes_over_absent_engines() -> None:
    core = coordinator(balance="round_robin")
    assert [core.route("f", Route(i, 1), 0.0).engine for i in range(6)] == [0, 1, 2, 3, 0, 1]
    core.engine_lost(2, 0, "killed")
    assert [core.route("f", Route(i, 1), 0.0).engine for i in range(4)] == [3, 0, 1, 3]


@pytest.mark.parametrize("balance", ["p2c", "least"])
def test_ties_go_to_every_engine(balance: str) -> None:
    firsts = Counter(burst(coordinator(balance=balance, seed=seed), 1).most_common(1)[0][0] for seed in range(200))
    assert all(firsts[engine] >= 25 for engine in range(4)), firsts


def test_a_late_snapshot_does_not_send_the_next_burst_to_one_engine() -> None:
    core = coordinator()
    first = burst(core, 200)
    for engine in range(4):  # reports written before the burst arrived: still idle, nothing admitted
        core.engine_reported(load(engine, seq=2))
    both = first + burst(core, 200)
    assert all(80 <= both[engine] <= 120 for engine in range(4)), both


def test_long_prompts_count_more_than_short_ones() -> None:
    core = coordinator(2, "least")
    busy = core.route("f", Route(1, 10_000), 0.0).engine
    assert all(core.route("f", Route(i, 100), 0.0).engine != busy for i in range(20))


def test_choices_of_one_prompt_count_as_rows() -> None:
    core = coordinator(2, "least")
    busy = core.route("f", Route(1, 100, num_choices=16), 0.0).engine
    assert all(core.route("f", Route(i, 100), 0.0).engine != busy for i in range(15))


def test_pressure_makes_an_engine_dearer() -> None:
    idle, nothing = load(0), Outstanding()
    busy = load(0, num_running=4, running_tokens=4000, blocks_used=50)
    assert cost_of(None, nothing) == cost_of(idle, nothing) == 0.0
    assert cost_of(busy, nothing) > 0
    full = load(0, num_running=4, running_tokens=4000, blocks_used=98)
    assert cost_of(full, nothing) > 1.5 * cost_of(busy, nothing)
    stale = load(0, num_running=4, running_tokens=4000, blocks_used=50, oldest_wait_s=10.0)
    assert cost_of(stale, nothing) > 3 * cost_of(busy, nothing)


def test_pins_are_obeyed_or_refused_with_the_reason() -> None:
    core = coordinator()
    assert {core.route("f", Route(i, 10, pin=3), 0.0).engine for i in range(10)} == {3}
    refused = core.route("f", Route(1, 10, pin=9), 0.0)
    assert (refused.engine, refused.ticket) == (-1, 0)
    assert refused.error == "there is no engine 9; the engines are 0..3"
    core.engine_lost(3, 0, "process 77 of engine-3 died")
    refused = core.route("f", Route(1, 10, pin=3), 0.0)
    assert refused.error == "engine 3 is down: process 77 of engine-3 died"


def test_nothing_is_ready_says_why() -> None:
    core = Coordinator(2, "p2c", random.Random(0))
    routed = core.route("f", Route(1, 10), 0.0)
    assert routed.engine == -1
    assert "none of 2 engines is ready" in routed.error
    assert "has not connected yet" in routed.error


def test_an_engines_death_forgets_its_load_and_its_next_life_starts_empty() -> None:
    core = coordinator(2)
    for i in range(10):
        core.route("f", Route(i, 500, pin=0), 0.0)
    core.engine_lost(0, 0, "killed")
    assert [core.route("f", Route(i, 1), 0.0).engine for i in range(5)] == [1] * 5
    core.engine_reported(load(0, seq=9))  # its last words, late: it stays down
    assert core.members.ready() == [1]
    core.engine_connected(0, 1)
    core.engine_reported(load(0, epoch=0, seq=10))  # of the former life
    assert core.members.ready() == [1]
    core.engine_reported(load(0, epoch=1, seq=1))
    assert core.members.ready() == [0, 1]
    assert core.cost(0) == 0
    assert core.route("f", Route(1, 1, pin=0), 0.0).epoch == 1


def test_a_new_coordinator_is_right_after_one_report_of_each_engine() -> None:
    core = Coordinator(2, "least", random.Random(0), epoch=1)
    core.engine_connected(0, 0)
    core.engine_reported(load(0, seq=500, num_running=20, running_tokens=9000, admitted={"front-0": 77}))
    core.engine_connected(1, 0)
    core.engine_reported(load(1, seq=400))
    routed = core.route("front-0", Route(1, 10), 0.0)
    assert routed.engine == 1
    assert routed.ticket > 77


def test_returned_tickets_and_lost_front_ends_leave_no_load() -> None:
    core = coordinator(2)
    routed = core.route("front-0", Route(1, 100), 0.0)
    core.released("front-0", Released(routed.engine, routed.epoch, 1))
    for i in range(5):
        core.route("front-1", Route(i, 100), 0.0)
    core.front_lost("front-1")
    assert core.cost(0) == core.cost(1) == 0
    core.released("front-0", Released(7, 0, 1))  # nonsense is ignored
    core.released("front-0", Released(0, 5, 1))


def test_views_tell_state_load_and_what_is_on_the_way() -> None:
    core = coordinator(2)
    core.route("f", Route(1, 10, num_choices=3, pin=1), 0.0)
    view = core.view()
    assert [(m.engine, m.state, m.in_flight) for m in view.members] == [(0, "ready", 0), (1, "ready", 3)]
    assert core.view().seq == view.seq + 1


def test_illegal_changes_of_state_name_both_states() -> None:
    members = Members(1)
    members.connected(0, 0)
    members.lost(0, 0, "gone")
    with pytest.raises(AssertionError, match="from down to ready"):
        members[0].enter("ready")


def test_every_policy_of_the_settings_exists() -> None:
    (balance,) = [setting for setting in table() if setting.name == "balance"]
    assert set(balance.choices) == set(POLICIES)
    assert CoordinatorConfig().balance in POLICIES


# ---------------------------------------------------------------- weights


def test_weighted_round_robin_is_exact_and_smooth() -> None:
    core = coordinator(3, "round_robin", fleet=Topology({0: 4.0, 1: 2.0, 2: 1.0}))
    turns = [core.route("f", Route(i, 1), 0.0).engine for i in range(70)]
    assert Counter(turns) == {0: 40, 1: 20, 2: 10}
    assert all(Counter(turns[i : i + 7]) == {0: 4, 1: 2, 2: 1} for i in range(0, 70, 7))
    assert not any(turns[i : i + 4] == [0] * 4 for i in range(66)), "the heavy one's turns are spread"


def test_an_engine_that_was_away_gets_no_turns_for_that_time() -> None:
    core = coordinator(2, "round_robin")
    core.engine_lost(1, 0, "killed")
    assert [core.route("f", Route(i, 1), 0.0).engine for i in range(50)] == [0] * 50
    core.engine_connected(1, 1)
    core.engine_reported(load(1, epoch=1))
    turns = [core.route("f", Route(i, 1), 0.0).engine for i in range(10)]
    assert Counter(turns) == {0: 5, 1: 5}


@pytest.mark.parametrize("balance", ["least", "p2c"])
def test_larger_engines_get_more_of_a_burst(balance: str) -> None:
    core = coordinator(2, balance, fleet=Topology({0: 3.0, 1: 1.0}))
    counts = burst(core, 400)
    assert 299 <= counts[0] <= 301, counts


# ---------------------------------------------------------------- labels

RACKS = Topology(labels=("a", "a", "b", "b"))


@pytest.mark.parametrize("balance", POLICIES)
def test_requests_stay_near_while_that_is_not_much_dearer(balance: str) -> None:
    core = coordinator(balance=balance, fleet=RACKS)
    assert {core.route("f", Route(i, 10, label="b"), 0.0).engine for i in range(6)} == {2, 3}
    assert {core.route("f", Route(i, 10, label="a"), 0.0).engine for i in range(6)} == {0, 1}


@pytest.mark.parametrize("balance", ["p2c", "least"])
def test_a_burst_from_one_place_spills_over_and_then_nobody_is_far_dearer(balance: str) -> None:
    core = coordinator(balance=balance, fleet=RACKS)
    counts = Counter(core.route("f", Route(i, 10, label="a"), 0.0).engine for i in range(400))
    near, far = counts[0] + counts[1], counts[2] + counts[3]
    assert far >= 100, counts
    assert near > far, counts
    assert core.cost(0) < 2.5 * core.cost(2) + 1000


@pytest.mark.parametrize("label", ["", "c"])
def test_no_label_and_one_that_no_engine_has_mean_anywhere(label: str) -> None:
    core = coordinator(fleet=RACKS)
    assert set(Counter(core.route("f", Route(i, 10, label=label), 0.0).engine for i in range(80))) == {0, 1, 2, 3}


def test_when_the_near_ones_are_away_a_far_one_serves_and_pins_go_anywhere() -> None:
    core = coordinator(fleet=RACKS)
    assert core.route("f", Route(1, 10, label="b", pin=0), 0.0).engine == 0
    for engine in (2, 3):
        core.engine_lost(engine, 0, "killed")
    assert core.route("f", Route(1, 10, label="b"), 0.0).engine in (0, 1)


# ---------------------------------------------------------------- shares

HALVES = Topology(share=2)


def test_a_front_end_with_a_share_gets_its_own_engines_only() -> None:
    core = coordinator(fleet=HALVES)
    assert {core.route("front-1", Route(i, 10), 0.0).engine for i in range(20)} == {2, 3}
    assert {core.route("front-llm", Route(i, 10), 0.0).engine for i in range(40)} == {0, 1, 2, 3}
    for engine in (2, 3):
        core.engine_lost(engine, 0, "killed")
    refused = core.route("front-1", Route(1, 10), 0.0)
    assert refused.engine == -1
    assert "killed" in refused.error
    assert core.route("front-0", Route(1, 10), 0.0).engine in (0, 1)


def test_waiting_rows_are_stolen_within_a_share_only() -> None:
    core = Coordinator(4, "p2c", random.Random(0), fleet=HALVES, steals_for=8)
    for engine in range(4):
        core.engine_connected(engine, 0)
        core.engine_reported(load(engine, num_running=8))
    core.engine_reported(load(0, seq=2, num_running=8, num_waiting=9, oldest_wait_s=1.0))
    core.engine_reported(load(3, seq=2))
    assert core.orders(0.0) == []
    core.engine_reported(load(1, seq=2))
    assert [(order.engine, order.to) for order in core.orders(0.0)] == [(0, 1)]

"""`trireme bench balance`: the figures that the policies promise, over the real coordinator and engine cores in virtual time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trireme.launch.bench.balance import measure
from trireme.launch.simulation.balance_sim import World, burst, conversation

FRONTS = [1, 4, 16]


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("balance", ["least", "prefix_least", "round_robin"])
def test_bursts_differ_by_one_at_most_with_least_loaded(balance: str, fronts: int) -> None:
    figures = measure(balance, fronts, seed=fronts)
    assert figures["burst_spread"] <= 1
    assert figures["burst_least"] >= 99


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("balance", ["p2c", "prefix", "alone"])
def test_bursts_are_80_to_120_with_two_choices(balance: str, fronts: int) -> None:
    figures = measure(balance, fronts, seed=10 + fronts)
    assert 80 <= figures["burst_least"] <= figures["burst_most"] <= 120


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("balance", ["prefix", "prefix_least"])
def test_talks_keep_95_percent_of_the_reachable_hits_while_a_burst_spreads(
    balance: str, fronts: int, seed: int
) -> None:
    figures = measure(balance, fronts, seed=seed)
    assert figures["hit_share"] >= 0.95
    assert figures["amid_spread"] <= 20


@pytest.mark.parametrize("balance", ["random", "round_robin", "p2c", "least"])
def test_policies_that_do_not_look_at_prefixes_keep_half_of_the_hits_at_most(balance: str) -> None:
    assert measure(balance, 4)["hit_share"] <= 0.6


def test_one_seed_is_one_run() -> None:
    first, second = (measure("prefix", 4, 50, seed=3) for _ in range(2))
    del first["route_us"], second["route_us"]
    assert first == second


def test_all_that_is_reachable_is_found_on_one_engine() -> None:
    """The yardstick itself: with one engine and room enough nothing can be missed."""
    world, found = World("prefix", num_engines=1), []
    for number in range(5):
        world.after(0.1 * number, lambda: conversation(world, 0, 4, found))
    world.run()
    assert len(found) == 20
    assert sum(asked.num_reachable for asked in found) > 2000
    assert [asked.num_cached for asked in found] == [asked.num_reachable for asked in found]


def test_loads_are_reported_and_settle() -> None:
    world = World("p2c")
    burst(world, 40)
    world.run()
    assert all(world.coordinator.cost(engine) == 0 for engine in range(4))
    assert all(engine.core.is_idle for engine in world.engines)


def test_the_command_prints_one_table_and_the_report_draws_it(tmp_path) -> None:
    command = [
        sys.executable,
        "-m",
        "trireme.launch.cli",
        "bench",
        "balance",
        "--fronts",
        "1,2",
        "--num-requests",
        "20",
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["series"] for row in rows} >= {"random", "round_robin", "p2c", "least", "prefix", "prefix_least"}
    (tmp_path / "A.json").write_text(done.stdout)
    command = [
        sys.executable,
        "-m",
        "trireme.launch.cli",
        "report",
        str(tmp_path / "A.json"),
        "--output",
        str(tmp_path / "A.html"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    text = (tmp_path / "A.html").read_text()
    for name in ("hit_share", "burst_spread", "amid_spread"):
        assert f"<figcaption>{name} " in text
    assert text.count("<svg") >= 5
    assert "src=" not in text


@pytest.mark.parametrize("words", [["--fronts", "0"], ["--fronts", "x"]])
def test_wrong_numbers_of_front_ends_are_refused_with_an_example(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trireme.launch.cli", "bench", "balance", *words], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--fronts 1,4,16" in done.stderr

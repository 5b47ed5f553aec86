"""How engines and front ends lie to one another, from the settings: what fits, and the refusals that name the number."""

from __future__ import annotations

import pytest

from trireme.errors import ConfigError
from trireme.settings import load
from trireme.topology.zones import MAX_LABEL, engines_of_front, fleet_of, front_label


def config(**flags: object):
    return load(flags, environ={}).config


def test_without_flags_all_engines_are_alike_and_nowhere() -> None:
    fleet = fleet_of(config(dp=2))
    assert (fleet.weight(1), fleet.label(1), fleet.labelled("", [0, 1])) == (1.0, "", [])
    assert front_label(config(), 0) == ""


def test_weights_and_labels_are_lists_by_engine_and_by_front_end() -> None:
    given = config(
        dp=3, engine_weights="2,1,0.5", engine_labels="a,b,a", api_servers=2, front_labels="a,b", balance="least"
    )
    fleet = fleet_of(given)
    assert [fleet.weight(e) for e in range(3)] == [2.0, 1.0, 0.5]
    assert fleet.labelled("a", [0, 1, 2]) == [0, 2]
    assert [front_label(given, i) for i in range(2)] == ["a", "b"]


def test_front_ends_share_the_engines_evenly_when_something_outside_balances() -> None:
    internal = config(dp=4, api_servers=2)
    assert [engines_of_front(internal, i) for i in range(2)] == [range(4), range(4)]
    assert fleet_of(internal).group_of_front("front-1") == -1
    hybrid = config(dp=4, api_servers=2, load_balancing="hybrid")
    assert [engines_of_front(hybrid, i) for i in range(2)] == [range(2), range(2, 4)]
    fleet = fleet_of(hybrid)
    assert [fleet.group(engine) for engine in range(4)] == [0, 0, 1, 1]
    assert [fleet.group_of_front(name) for name in ("front-0", "front-1", "front-llm", "client-7")] == [0, 1, -1, -1]
    external = config(dp=3, api_servers=3, load_balancing="external")
    assert [engines_of_front(external, i) for i in range(3)] == [range(1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dp": 4, "load_balancing": "external"}, ["4 engines", "there are 1"]),
        ({"dp": 4, "api_servers": 3, "load_balancing": "hybrid"}, ["4 engines", "3 HTTP processes"]),
        ({"dp": 2, "api_servers": 2, "load_balancing": "external", "port": 65535}, ["65535", "2 ports"]),
        ({"dp": 3, "engine_weights": "1,2"}, ["engine-weights", "2 entries", "3 engines"]),
        ({"dp": 3, "engine_labels": "a"}, ["engine-labels", "1 entries", "3 engines"]),
        ({"api_servers": 2, "front_labels": "a"}, ["front-labels", "2 HTTP processes"]),
        ({"dp": 2, "engine_weights": "1,0"}, ["'0'", "above 0"]),
        ({"dp": 2, "engine_weights": "1,nan"}, ["'nan'"]),
        ({"dp": 2, "engine_weights": "1,inf"}, ["'inf'", "at most 1000"]),
        ({"dp": 2, "engine_weights": "1,heavy"}, ["'heavy'"]),
        ({"dp": 2, "engine_labels": "a," + "b" * (MAX_LABEL + 1)}, [str(MAX_LABEL + 1), str(MAX_LABEL)]),
    ],
)
def test_refusals_name_flag_value_and_limit(flags: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet_of(config(**flags))
    assert all(word in caught.value.message for word in words), caught.value.message

"""Recorded events give byte-identical plans: a refactor of the engine core must not change one of them.

A change that means to alter plans runs `python -m tests.replay.recorder` and says so in its message.
"""

from __future__ import annotations

import zlib

import pytest

from tests.replay.recorder import SEEDS, TRACES, digests, record
from trireme.engine_core.events import events_from_log, log_from_events, plans_of


@pytest.mark.parametrize("seed", SEEDS)
def test_recorded_events_give_identical_plans(seed: int) -> None:
    events = events_from_log(zlib.decompress((TRACES / f"scene-{seed}.events").read_bytes()))
    expected = (TRACES / f"scene-{seed}.plans").read_text().splitlines()
    found = digests(plans_of(events)).splitlines()
    assert len(expected) > 50
    for number, (old, new) in enumerate(zip(expected, found, strict=True), 1):
        assert new == old, f"plan {number} of {len(expected)} differs"


def test_a_fresh_recording_replays_to_the_plans_it_saw() -> None:
    events = record(99)
    again = events_from_log(log_from_events(events))
    assert log_from_events(again) == log_from_events(events)
    assert plans_of(again) == plans_of(events)

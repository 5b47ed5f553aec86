"""What the explorer searches is what runs: the shells of the product go with it from event to event, in the same state."""

from __future__ import annotations

import pytest

from tests.sim.test_waves import (
    KEEP,
    LONG,
    ONE,
    SETTINGS,
    WAIT,
    NeverEnds,
    PausesAlone,
    ReadyTooEarly,
    SilentToNewcomers,
)
from tests.sim.wave_model import Setting
from tests.sim.wave_shells import Shells, walk
from trireme.coordinator.core import Coordinator
from trireme.coordinator.waves import Waves
from trireme.engine_core.lifecycle.wave import Wave

WALKS = 60
MIXED = {
    "two clients": Setting((*LONG, (2, 1)), (*KEEP, *WAIT)),
    "everything": Setting((*LONG, (0, 1)), (*KEEP, ("abort", "")), crashes=2, restarts=2),
    "everything, two steps ahead": Setting((*LONG, (0, 1)), KEEP, crashes=1, restarts=1, depth=2),
}
EASY = {name: setting for name, (setting, _) in SETTINGS.items() if setting.in_order}


@pytest.mark.parametrize("name", [*EASY, *MIXED])
def test_shells_and_model_go_the_same_way(name: str) -> None:
    setting = {**EASY, **MIXED}[name]
    events = [event for seed in range(WALKS) for event in walk(setting, seed)]
    print(f"{name}: {len(events)} events")
    wanted = {"learns": True, "starts again": setting.crashes, "replaced": setting.restarts, "asks": setting.scripts}
    for what, is_wanted in wanted.items():
        assert any(what in event for event in events) == bool(is_wanted), what


def test_the_shells_hold_the_machines_that_are_searched() -> None:
    shells = Shells(Setting())
    assert isinstance(shells.core, Coordinator)
    assert type(shells.core.waves) is Waves
    assert {type(engine.wave) for engine in shells.engines if engine is not None} == {Wave}


@pytest.mark.parametrize(
    ("wave", "setting"),
    [
        (NeverEnds, Setting(ONE)),
        (PausesAlone, Setting(ONE, KEEP)),
        (ReadyTooEarly, Setting(((0, 2),), WAIT)),
        (SilentToNewcomers, Setting(ONE, restarts=1)),
    ],
)
def test_an_engine_with_another_rule_is_found_out(wave: type[Wave], setting: Setting) -> None:
    def search() -> None:
        for seed in range(100):
            walk(setting, seed, wave=wave)

    with pytest.raises(AssertionError, match="shells"):
        search()

"""What faults touch: where only the coordinator is to fail, nothing between front ends and engines does."""

from __future__ import annotations

from tests.sim.scene import draw_scene
from tests.sim.world import World
from trireme.coordinator.simulation.faults import Fault

TO_ENGINE, TO_COORDINATOR = ("front-0", "engine-0"), ("front-0", "coordinator")


def test_a_slow_link_leaves_the_others_as_they_are() -> None:
    scene = draw_scene(0)
    scene.delays = (0.01, 0.0, 0.0)
    world = World(scene)
    world._fail(Fault(0.0, "slow", (">".join(TO_COORDINATOR),), 1.0))
    assert all(0.005 <= world._delay(TO_ENGINE) <= 0.015 for _ in range(50))
    assert all(0.1 <= world._delay(TO_COORDINATOR) <= 0.3 for _ in range(50))
    world.timeline.now = 1.0
    assert world._delay(TO_COORDINATOR) <= 0.015


def test_faults_of_the_coordinator_alone_name_nothing_else() -> None:
    scenes = [scene for seed in range(2000) if (scene := draw_scene(seed)).only_coordinator]
    targets = [(fault.kind, target) for scene in scenes for fault in scene.faults for target in fault.targets]
    assert {target.rpartition(">")[2] for _, target in targets} == {"coordinator"}
    assert {kind for kind, _ in targets} >= {"kill", "freeze", "jump", "break", "clog", "partition", "swizzle", "slow"}


def test_a_slow_network_is_slow_everywhere() -> None:
    scenes = [scene for seed in range(300) if not (scene := draw_scene(seed)).only_coordinator]
    slow = [(scene, fault) for scene in scenes for fault in scene.faults if fault.kind == "slow"]
    assert len(slow) > 20
    for scene, fault in slow:
        links = {f"{front}>{engine}" for front in scene.fronts for engine in scene.engines}
        if scene.has_coordinator:
            links |= {f"{client}>coordinator" for client in (*scene.fronts, *scene.engines)}
        assert set(fault.targets) == links

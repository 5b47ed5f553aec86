"""A step that other ranks have a part in, without a GPU: watched until it has ended, and never believed when a rank was missing."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from trireme.errors import CollectiveError, EngineError
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.watchdog import CollectiveWatchdog
from trireme.workers.cuda.ranks import launch_with, sampling_mesh

CPU = torch.device("cpu")
DONE = object()


class Group:
    """The part of CudaGroup that a ticket knows."""

    def __init__(self) -> None:
        self.now, self.aborts, self.trouble = 0.0, 0, ""
        self.watch = CollectiveWatchdog(lambda: "", self.abort, stuck_s=10.0, clock=lambda: self.now)

    def abort(self) -> None:
        self.aborts += 1

    def check(self) -> None:
        if self.trouble:
            raise CollectiveError(self.trouble)

    def is_watching(self) -> bool:
        """Whether something is under way that would count as stuck much later."""
        self.now += 1000.0
        return self.watch.look()


class Step:
    """A launched step."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return DONE


def launch(group: Group, step: Step, *, reports: bool = True) -> Any:
    return launch_with(group, lambda: cast(Any, step), CPU, reports=reports)


@pytest.mark.parametrize("reports", [True, False])
def test_a_step_is_watched_until_its_result_is_there(reports: bool) -> None:
    group = Group()
    ticket = launch(group, Step(), reports=reports)
    assert ticket.result() is (DONE if reports else None)
    assert not group.is_watching()


def test_a_step_whose_result_nobody_gets_is_noticed() -> None:
    group = Group()
    launch(group, Step())
    assert group.is_watching()
    assert group.aborts == 1


def test_a_result_with_a_missing_part_is_not_believed() -> None:
    group = Group()
    ticket = launch(group, Step())
    group.trouble = "another rank did not take part"
    with pytest.raises(CollectiveError, match="did not take part"):
        ticket.result()
    assert not group.is_watching()


def test_a_step_that_fails_is_not_watched_any_more() -> None:
    group = Group()
    with pytest.raises(EngineError, match="bad"):
        launch(group, Step(EngineError("bad"))).result()
    assert not group.is_watching()


def test_a_launch_that_fails_keeps_nobody_waiting() -> None:
    group = Group()

    def fail() -> Any:
        raise EngineError("a plan that does not fit")

    with pytest.raises(EngineError, match="does not fit"):
        launch_with(group, fail, CPU, reports=True)
    assert group.aborts == 1


def test_every_rank_of_the_last_stage_samples_as_if_alone() -> None:
    mesh = Mesh(1, 2, 2)
    assert [sampling_mesh(mesh.at_worker(worker)).reports_result for worker in range(4)] == [False, False, True, True]
    assert [mesh.at_worker(worker).reports_result for worker in range(4)] == [False, False, True, False]

"""Several GPUs that execute the same steps: a launched step of one rank, bounded in time. Used by workers.cuda.worker.

Every rank of a stage samples every sequence by itself: logits are gathered, so all see the same bits, and noise is a function of
the request alone. So no token waits for a broadcast, and tokens sampled on the host are the same everywhere too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trireme.topology.mesh import Mesh
from trireme.transport.wire.messages import StepResult
from trireme.workers.collectives.watchdog import CollectiveWatchdog
from trireme.workers.cuda.runner import LaunchedStep
from trireme.workers.cuda.staging import Event

ALONE = Mesh(1, 1, 1)


class Ranks(Protocol):
    """The part of workers.collectives.cuda.CudaGroup that is used here."""

    watch: CollectiveWatchdog

    def check(self) -> None: ...

    def abort(self) -> None: ...


class RankTicket:
    """A step that other ranks take part in. Its result is None on all workers but the reporting one."""

    def __init__(self, ticket: LaunchedStep, group: Ranks, number: int, device: torch.device, *, reports: bool) -> None:
        self._ticket, self._group, self._number, self._reports = ticket, group, number, reports
        self._end = Event(device)
        self._end.record()

    def result(self) -> StepResult | None:
        """Waits for the step. Raises CollectiveError when another rank did not do its part in time."""
        try:
            found = self._ticket.result()
            self._end.wait()
        finally:
            self._group.watch.end(self._number)
        self._group.check()
        return found if self._reports else None


def launch_with(group: Ranks, launch: Callable[[], LaunchedStep], device: torch.device, *, reports: bool) -> RankTicket:
    """Launches a step. If that raises, the other ranks are aborted instead of waiting."""
    number = group.watch.begin()
    try:
        return RankTicket(launch(), group, number, device, reports=reports)
    except BaseException:
        group.abort()
        raise


def sampling_mesh(mesh: Mesh) -> Mesh:
    """The mesh as the host's runner sees it: on the last stage every rank samples as if it were alone."""
    return ALONE if mesh.is_last_stage else mesh

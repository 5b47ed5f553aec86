"""The fake worker as one that launches: its steps run in order in a thread of their own, as on a device."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from trireme.transport.wire.messages import StepPlan, StepResult, WorkerInit
from trireme.workers.fake import FakeWorker


class Worker(FakeWorker):
    """Its `launch` returns before the step has run."""

    def __init__(self, init: WorkerInit, progress: Any) -> None:
        super().__init__(init, progress)
        self._device = ThreadPoolExecutor(1)
        self.started = 0

    def launch(self, plan: StepPlan) -> Future[StepResult | None]:
        """A future, which waits as a Ticket does."""
        self.started += 1
        return self._device.submit(self.execute, plan)

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """`started` says how many steps were launched, however many have ended."""
        return self.started if method == "started" else super().call(method, args)

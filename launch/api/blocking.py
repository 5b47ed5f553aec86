"""An asyncio loop in a thread, for blocking callers: results of coroutines, items of async generators, Ctrl-C as cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")

_END: Any = object()


class LoopThread:
    """Runs until `close`. Its methods may be called from any thread but the loop's own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result. KeyboardInterrupt here cancels it there, and is re-raised once it has ended."""
        job = _Job(work)
        self._loop.call_soon_threadsafe(job.start)
        try:
            result: Result = job.outcome.result()
            return result
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(job.cancel)
            job.outcome.exception()  # waits for its end
            raise

    def iterate(self, items: AsyncGenerator[Result, None]) -> Iterator[Result]:
        """The generator's items. Leaving early, also by KeyboardInterrupt, first closes the generator in the loop."""
        try:
            while (item := self.wait(_next(items))) is not _END:
                yield item
        finally:
            self.wait(items.aclose())

    def close(self) -> None:
        """Ends the loop and cancels everything still running in it. May be called twice."""
        if self._thread.is_alive():
            self.wait(_cancel_all())
            self.wait(self._loop.shutdown_default_executor())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Job:
    """One coroutine in the loop, and its outcome for the waiting thread."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.outcome: Future[Any] = Future()
        self._work = work
        self._task: asyncio.Task[Any] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(task.result())


async def _next(items: AsyncGenerator[Result, None]) -> Result:
    item: Result = await anext(items, _END)
    return item


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

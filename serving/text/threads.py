"""Threads for the text work of large requests, so that a long prompt does not delay other streams.

Made by serving/front.py. Long texts have a thread of their own, so that they do not delay shorter ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trireme.serving.text.chat_prompt import ChatPromptFields, ChatRenderer, Segments
from trireme.serving.text.template_meter import TemplateSlow

ON_LOOP_BYTES = 8192  # the text of larger requests is tokenized in a thread
LONG_BYTES = 256 << 10  # and that of those in the thread for long texts
ON_LOOP_RENDER_S = 0.01  # limit of a chat template on the event loop

Result = TypeVar("Result")


class TextThreads:
    """Work of requests by their size in bytes: on the event loop, in a thread, or in the thread for long texts."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")
        self._is_template_slow = False  # it has once reached ON_LOOP_RENDER_S

    async def run(self, num_bytes: int, work: Callable[[], Result], *, most: int = ON_LOOP_BYTES) -> Result:
        """The result of `work` for a request of `num_bytes`; up to `most` of them it is done at once, on the event loop."""
        if num_bytes <= most:
            return work()
        threads = self._short if num_bytes <= LONG_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    async def segments(self, renderer: ChatRenderer, request: ChatPromptFields, num_bytes: int) -> Segments:
        """The parts of a chat's prompt, rendered on the event loop if the request is small and the template fast, else in a thread.
        Raises RequestError."""
        if num_bytes <= ON_LOOP_BYTES and not self._is_template_slow:
            try:
                return renderer.segments(request, limit_s=ON_LOOP_RENDER_S)
            except TemplateSlow:
                self._is_template_slow = True
        return await self.run(num_bytes, lambda: renderer.segments(request), most=-1)

    def close(self) -> None:
        """Drops what has not begun; does not wait."""
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

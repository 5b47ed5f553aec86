"""Server-sent events: writes a generation to one HTTP client, with pings, and notices clients that left or do not read.

Called by serving/app.py. One task per stream; one write per wake-up, however many tokens it brings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from starlette.types import Message, Receive, Scope, Send

from serving.gate import send_body
from serving.generation import Generation, TextDelta, Usage
from serving.wire_openai import error_body
from trireme.errors import TriremeError

PING_S = 15.0
FIRST_EVENT_S = 10.0  # after this the answer starts with a ping instead of waiting to learn its status
STALL_S = 30.0
BYTES_PER_EVENT = 192  # of a pending event once it is written, roughly

Outcome = Literal["complete", "error", "cancelled"]


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Format(Protocol):
    """How deltas look on the wire."""

    def event(self, delta: TextDelta, usage: Usage | None) -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def add(self, delta: TextDelta) -> None: ...

    def whole(self, generation: Generation) -> bytes: ...


class EventStream:
    """One streamed answer. `sending_since` is set while a write waits for a slow reader."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, generation: Generation) -> None:
        self.generation = generation
        self.sending_since: float | None = None
        self.last_sent = time.monotonic()
        self.wants_ping = False
        self._is_gone = False
        self.failure: BaseException | None = None
        self._scope = scope
        self._receive = receive
        self._send = send
        self._submitting: asyncio.Task[Any] | None = None
        self._watch = asyncio.ensure_future(self._watch_client())

    async def _watch_client(self) -> None:
        """Ends the generation as soon as the client closes its connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_gone = True
        self.generation.close()
        if self._submitting is not None:
            self._submitting.cancel()

    async def submit(self, *, pin: int, label: str) -> None:
        """Submits the request, which may wait for an engine: no longer than the client does."""
        task = self._submitting = asyncio.current_task()
        try:
            await self.generation.submit(pin=pin, label=label)
        except asyncio.CancelledError:
            if task is None or not self._is_gone or task.uncancel():
                raise
        finally:
            self._submitting = None

    def has_left(self) -> bool:
        """True when the client closed its connection, or was cut off."""
        return self._is_gone

    async def first(self) -> list[TextDelta] | None:
        """The first batch that holds anything; [] after FIRST_EVENT_S without one; None when all ended. Raises the request's
        error."""
        waiting = asyncio.ensure_future(self._first_deltas())
        try:
            await asyncio.wait((waiting,), timeout=FIRST_EVENT_S)
            if waiting.done():
                return waiting.result()
            return []
        finally:
            if not waiting.done():
                waiting.cancel()

    async def _first_deltas(self) -> list[TextDelta] | None:
        while (batch := await self.generation.next()) is not None:
            if batch[0]:
                return batch[0]
        return None

    async def run(
        self,
        form: Format,
        first: list[TextDelta] | None,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> Outcome:
        """Writes the whole answer. An error after the start becomes an error event, and no end marker follows it."""
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]})
        if not first:
            await self._write(b": waiting\n\n")
        deltas = first if first is not None else []
        generation = self.generation
        try:
            while True:
                if deltas:
                    usage = generation.usage() if continuous_usage else None
                    chunk = b"".join([form.event(delta, usage) for delta in deltas])
                    if chunk:
                        await self._write(chunk)
                elif self.wants_ping:
                    self.wants_ping = False
                    await self._write(b": ping\n\n")
                batch = await generation.next()
                if batch is None:
                    break
                deltas = batch[0]
        except TriremeError as error:
            self.failure = error
            await self._finish(b"data: " + error_body(error) + b"\n\n")
            return "error"
        if self.failure is not None:
            return "error"
        if self.has_left():
            return "cancelled"
        end = form.usage_event(generation.usage()) if include_usage else b""
        await self._finish(end + b"data: [DONE]\n\n")
        return "complete"

    async def write_whole(self, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Outcome:
        """A whole answer, under the same eyes."""
        await send_body(self._send_watched, 200, body, headers)
        if self.failure is not None:
            return "error"
        return "cancelled" if self.has_left() else "complete"

    async def _write(self, data: bytes) -> None:
        await self._send_watched({"type": "http.response.body", "body": data, "more_body": True})
        self.last_sent = time.monotonic()

    async def _finish(self, data: bytes) -> None:
        self._watch.cancel()
        await self._send_watched({"type": "http.response.body", "body": data, "more_body": False})

    async def _send_watched(self, message: Message) -> None:
        self.sending_since = time.monotonic()
        await self._send(message)
        self.sending_since = None

    def close(self) -> None:
        self._watch.cancel()
        self.generation.close()

    # ------------------------------------------------------------ called by the ticker

    def tick(self, now: float, *, buffer_bytes: int) -> bool:
        """Asks for a ping on a silent stream; cuts off a reader that lags too far or too long, and says so with False."""
        if self.sending_since is None:
            if now - self.last_sent > PING_S:
                self.wants_ping = True
                self.last_sent = now
                self.generation.nudge()
            return True
        lag = self.generation.num_pending * BYTES_PER_EVENT
        stalled_s = now - self.sending_since
        if lag <= buffer_bytes and stalled_s <= STALL_S:
            return True
        self.cut(f"the client does not read: {lag} bytes behind, stalled for {stalled_s:.0f} s")
        return False

    def cut(self, reason: str) -> None:
        """Ends the stream without waiting for the reader."""
        self.failure = TriremeError(reason)
        self._is_gone = True
        self.generation.close()
        extension = self._scope.get("extensions", {}).get("trireme.transport")
        if extension is not None:
            extension["transport"].abort()


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Ticker:
    """Looks after all streams of a process once a second, so that streams need no timers of their own."""

    def __init__(self, *, buffer_bytes: int, on_cut: Callable[[], None]) -> None:
        self._on_cut = on_cut
        self.streams: set[EventStream] = set()
        self._buffer_bytes = buffer_bytes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for stream in list(self.streams):
                if not stream.tick(now, buffer_bytes=self._buffer_bytes):
                    self.streams.discard(stream)
                    self._on_cut()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

"""Server-sent events: writes a generation to one HTTP client, with pings, and detects clients that left or do not read.

Called by serving/api/answer.py. One task per stream; one write per wake-up, however many tokens it brings. A reader
that is too slow hears so in a last event, as long as its connection takes anything; one that takes nothing is reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec
from starlette.types import Message, Receive, Scope, Send

from trireme.errors import SlowReaderError, TriremeError
from trireme.log import facts
from trireme.serving.http.errors import envelope_of
from trireme.serving.http.middleware import PIECE_BYTES, send_body
from trireme.serving.text.deltas import Delta, TextDelta, Usage
from trireme.serving.text.generation import Generation

log = logging.getLogger(__name__)

PING_S = 15.0
FIRST_EVENT_S = (
    10.0  # after this the answer of a request that runs starts with a ping instead of waiting to learn its status
)
STALL_S = 30.0
# A stream that ends since its reader is slow waits for room for its last event: while the connection takes bytes, and no longer
# than LAST_S.
TAKE_S = 10.0
LAST_S = 30.0
BYTES_PER_EVENT = 192  # of a pending event once it is written, roughly, while a stream has none that would tell
LOOK_S = 0.25

Outcome = Literal["complete", "error", "cancelled"]
Look = Literal["fine", "ended", "reset"]


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's `usage` object, in tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Format(Protocol):
    """Renders deltas as one API writes them: `event` for streams, `add` and `whole` for whole answers."""

    def event(self, delta: Delta, usage: Usage | None) -> bytes: ...

    def usage_event(self, usage: Usage) -> bytes: ...

    def add(self, delta: Delta) -> None: ...

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
        self._is_streamed = False  # an event may follow
        self._ended_at: float | None = None  # for its slow reader
        self._unsent = 0  # bytes that the connection had not taken when last looked at, while a write waits
        self._taken_at = 0.0  # when it last took some
        self._num_formed = 0  # bytes of all events so far
        self._num_held = 0  # of those, what the connection was not given yet
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
        """The first batch that holds anything; [] after FIRST_EVENT_S without one, but not while the request is queued and could
        still be refused: it gets its status then. None when all ended. Raises the request's error."""
        waiting = asyncio.ensure_future(self._first_deltas())
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=FIRST_EVENT_S)
                if not waiting.done() and not self.generation.may_be_refused:
                    return []
            return waiting.result()
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
        first: Sequence[Delta] | None,
        headers: Iterable[tuple[bytes, bytes]],
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> Outcome:
        """Writes the whole answer. An error after the start becomes an error event, and no end marker follows it."""
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *headers]})
        self._is_streamed = True
        try:
            await self._write_events(form, first, continuous_usage=continuous_usage)
        except TriremeError as error:
            self.failure = error
        except Exception as error:
            with contextlib.suppress(Exception):
                await self._finish(self._error_event(error))
            raise
        if self.has_left():
            return "cancelled" if self.failure is None else "error"
        if self.failure is not None:
            await self._finish(self._error_event(self.failure))
            return "error"
        end = form.usage_event(self.generation.usage()) if include_usage else b""
        await self._finish(end + b"data: [DONE]\n\n")
        return "complete"

    async def _write_events(self, form: Format, first: Sequence[Delta] | None, *, continuous_usage: bool) -> None:
        """Writes all deltas, or those until the stream is ended because its reader is slow."""
        if not first:
            await self._write(b": waiting\n\n")
        deltas: Sequence[Delta] = first if first is not None else []
        generation = self.generation
        while self.failure is None:
            if deltas:
                if continuous_usage:
                    counted = zip(deltas, _usages(generation.usage(), deltas), strict=True)
                    chunk = b"".join([form.event(delta, usage) for delta, usage in counted])
                else:
                    chunk = b"".join([form.event(delta, None) for delta in deltas])
                self._num_formed += len(chunk)
                if chunk:
                    await self._write_pieces(chunk)
            elif self.wants_ping:
                self.wants_ping = False
                await self._write(b": ping\n\n")
            batch = await generation.next()
            if batch is None:
                break
            deltas = batch[0]

    async def _write_pieces(self, chunk: bytes) -> None:
        """Writes whole events in pieces, so that little precedes the last event if the stream is ended."""
        start = 0
        while start < len(chunk) and self.failure is None:
            end = _end_of_piece(chunk, start)
            self._num_held = len(chunk) - start
            await self._write(chunk[start:end] if end - start < len(chunk) else chunk)
            start = end
        self._num_held = 0

    async def write_whole(self, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Outcome:
        """Writes a whole answer, with the same limits for slow readers."""
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

    def _error_event(self, error: BaseException) -> bytes:
        return b"data: " + envelope_of(self._scope).body(error) + b"\n\n"

    def close(self) -> None:
        self._watch.cancel()
        self.generation.close()

    # ------------------------------------------------------------ called by the ticker

    def lag(self) -> int:
        """Bytes that wait for the reader outside of its connection: what is written already, and events that will be, each as
        long as those of this stream have been so far."""
        taken = self.generation.num_taken
        per_event = self._num_formed / taken if self._num_formed else BYTES_PER_EVENT
        return self._num_held + int(self.generation.num_pending * per_event)

    def look(self, now: float, *, buffer_bytes: int) -> Look:
        """Asks for a ping on a silent stream; ends that of a reader that lags too far or too long, and resets its connection if
        not even the last event can be sent."""
        if self.sending_since is None:
            if now - self.last_sent > PING_S:
                self.wants_ping = True
                self.last_sent = now
                self.generation.nudge()
            return "fine"
        self._see_taken(now)
        if self._ended_at is not None:
            if self._is_streamed and now - self._taken_at <= TAKE_S and now - self._ended_at <= LAST_S:
                return "fine"
            self._reset()
            return "reset"
        lag = self.lag()
        stalled_s = now - self.sending_since
        if lag <= buffer_bytes and stalled_s <= STALL_S:
            return "fine"
        self._ended_at = now
        self.failure = SlowReaderError(
            f"this answer was read too slowly: about {lag} bytes of it waited (the limit is {buffer_bytes}), the oldest for "
            f"{stalled_s:.0f} s (the limit is {STALL_S:.0f} s)",
            hint="read faster, or start the server with a larger --stream-buffer",
        )
        self.generation.close()
        return "ended"

    def _see_taken(self, now: float) -> None:
        """Notes when the connection last took bytes. Nothing is added to its buffer while a write waits, so a shorter buffer means
        progress."""
        assert self.sending_since is not None
        transport = self._transport()
        unsent = transport.get_write_buffer_size() if transport is not None else 0
        if self._taken_at < self.sending_since:
            self._taken_at = self.sending_since
        elif unsent < self._unsent:
            self._taken_at = now
        self._unsent = unsent

    def _reset(self) -> None:
        self._is_gone = True
        if (transport := self._transport()) is not None:
            transport.abort()

    def _transport(self) -> asyncio.Transport | None:
        extension = self._scope.get("extensions", {}).get("trireme.transport")
        return extension["transport"] if extension is not None else None


def _usages(usage: Usage, deltas: Sequence[Delta]) -> Iterator[Usage]:
    """The usage after each of `deltas`; `usage` is that after all of them."""
    num_tokens = usage.completion_tokens - sum(len(delta.tokens) for delta in deltas)
    for delta in deltas:
        num_tokens += len(delta.tokens)
        yield msgspec.structs.replace(usage, completion_tokens=num_tokens)


def _end_of_piece(chunk: bytes, start: int) -> int:
    """End of the piece from `start`: as many whole events as fit PIECE_BYTES, at least one."""
    end = start + PIECE_BYTES
    if end >= len(chunk):
        return len(chunk)
    found = chunk.rfind(b"\n\n", start, end)
    if found < 0:
        found = chunk.find(b"\n\n", end - 1)
    return found + 2


_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Ticker:
    """Checks all streams of a process periodically, so that streams need no timers of their own. `on_look` is called for each slow
    reader with what was done."""

    def __init__(self, *, buffer_bytes: int, on_look: Callable[[Look], None]) -> None:
        self._on_look = on_look
        self.streams: set[EventStream] = set()
        self._buffer_bytes = buffer_bytes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            found: Counter[Look] = Counter()
            for stream in list(self.streams):
                while (look := stream.look(now, buffer_bytes=self._buffer_bytes)) != "fine":
                    found[look] += 1
                    self._on_look(look)
                    if look == "reset":
                        self.streams.discard(stream)
                        break
            if found:
                log.warning(
                    "streams of slow readers. %s", facts(ended=found["ended"], connections_reset=found["reset"])
                )

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

"""Bodies of requests while they arrive: reading them, their number and bytes, and which one is dropped when the budget is full.

Used by serving/front.py. A body counts as an open request only when it is complete, so clients that send half of one keep nobody
out; the memory of a stalled one is given to new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import Receive, Scope

from trireme.errors import OverloadedError, RequestError, TooLargeError, TriremeError

MAX_BODIES = 2048  # being read at one time
SMALL_BYTES = 64 << 10  # a body with no more needs no room in the budget, so that a few large ones keep nobody else out
STALLED_S = 1.0  # without a byte, after which a body may have to make room for others
BODY_TIMEOUT_S = 30.0


class MediaTypeError(RequestError):
    status = 415
    code = "unsupported_media_type"


class TimeoutRequestError(RequestError):
    status = 408
    code = "timeout"


class IncomingBody:
    """One body while it arrives. `stop` is called once if it is refused before its end; `refusal` says why."""

    __slots__ = ("caller", "is_whole", "moved_at", "num_bytes", "refusal", "stop")

    def __init__(self, caller: bytes, now: float) -> None:
        self.caller = caller
        self.moved_at = now
        self.num_bytes = 0
        self.is_whole = False
        self.refusal: TriremeError | None = None
        self.stop: Callable[[], None] | None = None

    def refuse(self, error: TriremeError) -> None:
        if self.refusal is None:
            self.refusal = error
            if self.stop is not None:
                self.stop()


class Bodies:
    """All bodies of a process that arrive or are not tokenized yet: at most `most` of them, in at most `budget` bytes. A body of at
    most `small` bytes is accepted over the budget."""

    def __init__(
        self,
        budget: int,
        *,
        most: int = MAX_BODIES,
        small: int = SMALL_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._budget = budget
        self._most = most
        self._small = small
        self._clock = clock
        self._bodies: dict[IncomingBody, None] = {}  # a set in order
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def begin(self, caller: bytes) -> IncomingBody:
        """Registers a body. Raises OverloadedError when there are too many and none is stalled."""
        now = self._clock()
        if len(self._bodies) >= self._most and not self._make_room(now, by_bytes=False):
            raise OverloadedError(f"{len(self._bodies)} bodies of requests are being read, the limit")
        body = IncomingBody(caller, now)
        self._bodies[body] = None
        return body

    def take(self, body: IncomingBody, num_bytes: int) -> None:
        """Counts received bytes. Raises OverloadedError when they exceed the budget and no other body is stalled."""
        now = body.moved_at = self._clock()
        while self.num_bytes + num_bytes > self._budget and body.num_bytes + num_bytes > self._small:
            if not self._make_room(now, by_bytes=True):
                raise OverloadedError(f"more than {self._budget} bytes of requests are being read")
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def end(self, body: IncomingBody) -> None:
        """Returns its bytes: it was tokenized or dropped. Idempotent."""
        if self._bodies.pop(body, body) is None:
            self.num_bytes -= body.num_bytes

    def refuse_all(self, error: TriremeError) -> None:
        """Refuses all bodies that still arrive, with `error`."""
        for body in [body for body in self._bodies if not body.is_whole]:
            self._drop(body, error)

    def _make_room(self, now: float, *, by_bytes: bool) -> bool:
        """Drops the body that has been stalled longest, of the caller that holds most. False when none is stalled."""
        stalled = [body for body in self._bodies if not body.is_whole and now - body.moved_at >= STALLED_S]
        stalled = [body for body in stalled if body.num_bytes or not by_bytes]
        if not stalled:
            return False
        share: Counter[bytes] = Counter()
        for body in self._bodies:
            share[body.caller] += body.num_bytes if by_bytes else 1
        longest = min(stalled, key=lambda body: (-share[body.caller], body.moved_at))
        self._drop(
            longest,
            OverloadedError(
                f"the body has not moved for {now - longest.moved_at:.0f} s, and others needed the room",
                hint="send the body at once",
            ),
        )
        return True

    def _drop(self, body: IncomingBody, error: TriremeError) -> None:
        self.end(body)
        body.refuse(error)


async def read_body(scope: Scope, receive: Receive, bodies: Bodies, body: IncomingBody, limit: int) -> bytes:
    """The whole body. Counts while reading and never holds more than `limit` bytes. Raises TooLargeError, MediaTypeError,
    TimeoutRequestError, RequestError when the client leaves, and what `body` was refused with."""
    check_head(scope, limit)
    parts: list[bytes] = []
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as timer:

            def stop() -> None:
                with contextlib.suppress(RuntimeError):  # its time is up already
                    timer.reschedule(loop.time())

            body.stop = stop
            while True:
                message = await receive()
                if body.refusal is not None:
                    raise body.refusal
                if message["type"] == "http.disconnect":
                    raise RequestError("the client left before its request was complete")
                part = message.get("body", b"")
                bodies.take(body, len(part))
                if body.num_bytes > limit:
                    raise TooLargeError(f"the body has more than {limit} bytes, the limit")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        if body.refusal is not None:
            raise body.refusal from None
        raise TimeoutRequestError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    finally:
        body.stop = None


def check_head(scope: Scope, limit: int) -> None:
    """Refuses a body by its headers: its length in bytes, its coding, its media type. Raises TooLargeError, MediaTypeError."""
    length = encoding = media = b""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"content-encoding":
            encoding = value
        elif name == b"content-type":
            media = value
    if length.isdigit() and int(length[:20]) > limit:
        raise TooLargeError(f"the body has {int(length[:20])} bytes; the limit is {limit}")
    if encoding not in (b"", b"identity"):
        raise MediaTypeError("compressed bodies are not accepted")
    if media and not media.split(b";")[0].strip().lower().endswith((b"/json", b"+json")):
        raise MediaTypeError("send the body as JSON, with content-type: application/json")

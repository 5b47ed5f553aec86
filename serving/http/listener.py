"""The HTTP listener: uvicorn on an inherited socket, with limits on headers and on how long a client may take to send them.

Called by serving/main.py. Refusals here come before any application code, in the same error envelope.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from trireme.errors import OverloadedError, RequestError
from trireme.serving.http.accept import Acceptor
from trireme.serving.http.connections import ConnectionCounts
from trireme.serving.http.errors import error_body

log = logging.getLogger(__name__)

HEADER_BYTES = 16 << 10
NUM_HEADERS = 100
HEADER_TIMEOUT_S = 10.0
IDLE_TIMEOUT_S = 75
# After a refusal: what the client still sends is read and dropped for so long, so that it can read the answer.
LINGER_S = 2.0
LINGER_BYTES = 4 << 20
UNSENT_BYTES = 64 << 10  # of an answer in the kernel, which would else take megabytes for a client that does not read
# A client that reads nothing of what waits for it for so long is cut off, whatever the application does.
UNREAD_S = 45.0
REFUSALS = 64  # connections over the limit that are told so at one time; more are closed without a word
SPARE_HANDLES = 256  # file handles for everything but connections
WANTED_CONNECTIONS = 10_000


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol that counts header bytes and connections, gives a request's head HEADER_TIMEOUT_S, cuts off clients that
    do not read, and shows its transport to the app."""

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._head_bytes = 0
        self._in_head = False
        self._in_body = False
        self._previous = self.cycle  # the request before the last one
        self._is_refused = False
        self._refusal: bytes | None = None  # that waits until what came before it has been answered
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Answers 503 to a connection over the limit, or aborts it when there are too many of these."""
        super().connection_made(transport)
        self._arm()
        over = len(self.connections) - self._max_connections
        if over > REFUSALS:
            transport.abort()
        elif over > 0:
            self._refuse(503, f"{self._max_connections} connections are open, the limit")

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        for timer in (self._linger_timer, self._unread_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def on_response_complete(self) -> None:
        """Sends a refusal that waited for this response, or drains what the client still sends."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._expect_reading()
        elif self._refusal is not None and self.cycle.response_complete:
            refusal, self._refusal = self._refusal, None
            self._say(refusal)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; aborts a refused connection that keeps sending, and refuses headers over the limit (431)."""
        if self._is_refused:
            if self._refusal is None:
                self._drop(len(data))
            else:
                self._dropped_bytes += len(data)
                if self._dropped_bytes > LINGER_BYTES:
                    self.transport.abort()
            return
        super().data_received(data)
        if self._in_head and not self._is_refused:
            # bytes the parser has not handed out yet count as well
            self._pending_bytes += len(data)
            if self._pending_bytes > 2 * HEADER_BYTES:
                self._refuse(431, "the request line and headers are too large")

    def on_message_begin(self) -> None:
        """Resets the counters of a request head and starts its timer."""
        super().on_message_begin()
        if self._linger_timer is not None:  # the refused body ended, and the connection goes on
            self._linger_timer.cancel()
            self._linger_timer = None
        self._dropped_bytes = 0
        self._head_bytes = 0
        self._pending_bytes = 0
        self._in_head = True
        if self._head_timer is None:
            self._arm()
        self.scope["extensions"] = {"trireme.transport": {"transport": self.transport}}

    _pending_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > NUM_HEADERS:
            self._refuse(431, f"more than {NUM_HEADERS} headers")

    def on_headers_complete(self) -> None:
        """Refuses a request without exactly one Host header (400), else starts the request."""
        self._in_head = False
        self._disarm()
        if self._is_refused:
            return
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or (num_hosts == 0 and version != "1.0"):
            self._refuse(400, f"the request has {num_hosts} Host headers; it must have one")
            return
        self._in_body = True
        self._previous = self.cycle
        super().on_headers_complete()
        if version == "1.0":
            _end_by_closing(self.cycle)

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        if self.cycle.response_complete:  # refused by the application before all of it was read
            self._drop(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        if not self._is_refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not a valid HTTP request")

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > HEADER_BYTES:
            self._refuse(431, f"the request line and headers have more than {HEADER_BYTES} bytes")

    def _arm(self) -> None:
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._on_late_head)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._in_head:
            self._refuse(408, f"the headers did not arrive within {HEADER_TIMEOUT_S:.0f} s")
        elif not self.transport.is_closing():
            self.transport.close()

    def _expect_reading(self) -> None:
        """Looks again after UNREAD_S, as long as something waits to be read."""
        if self._unread_timer is None:
            size = self.transport.get_write_buffer_size()
            self._unread_timer = self.loop.call_later(UNREAD_S, self._on_unread, size)

    def _on_unread(self, size_before: int) -> None:
        self._unread_timer = None
        if (size := self.transport.get_write_buffer_size()) >= size_before and size:
            self.transport.abort()
        elif size:
            self._expect_reading()

    def _refuse(self, status: int, why: str) -> None:
        """Answers what came last with an error and closes, once all that came before it has been answered."""
        if self._is_refused:
            return
        self._is_refused = True
        self._disarm()
        body = error_body(OverloadedError(why) if status == 503 else RequestError(why))
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        head += "retry-after: 1\r\n" if status == 503 else ""
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        refusal = head.encode() + body
        if self._in_body:
            refusal = self._give_up_last(refusal)
        if self.cycle is None or self.cycle.response_complete or self.cycle.disconnected:
            self._say(refusal)
        else:
            self._refusal = refusal

    def _give_up_last(self, refusal: bytes) -> bytes:
        """Takes back the request whose body is broken, and returns what is to be said of it."""
        cycle = self.cycle
        if cycle.response_started:
            return b""  # it has its answer, or the beginning of one
        if self.pipeline:
            self.pipeline.popleft()  # it has not begun
            self.cycle = self._previous
        else:
            cycle.disconnected = True  # so that the application reads no further, and what it says goes nowhere
            cycle.message_event.set()
        return refusal

    def _say(self, refusal: bytes) -> None:
        if not self.transport.is_closing():
            if refusal:
                self.transport.write(refusal)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._drop(0)

    def _drop(self, num_bytes: int) -> None:
        """Reads on for a moment without keeping anything: closing at once would reset the connection under the answer."""
        self._dropped_bytes += num_bytes
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        if self._dropped_bytes > LINGER_BYTES and not self.transport.is_closing():
            self.transport.close()


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: a body of unknown length ends where the connection does."""
    send = cycle.send
    has_length = True

    async def send_plain(message: ASGISendEvent) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not has_length:
                cycle.chunked_encoding = False
        elif message["type"] == "http.response.body" and not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain  # type: ignore[method-assign]


_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class _Server(uvicorn.Server):
    """Leaves signals to the process that owns it, and takes connections in its own way."""

    def __init__(self, config: uvicorn.Config, counts: ConnectionCounts | None) -> None:
        super().__init__(config)
        self._counts = counts

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn's lifespan, with an Acceptor for each socket in place of its own servers."""
        await super().startup(sockets=[])
        for listening in sockets or []:
            acceptor = Acceptor(
                listening,
                self._make_protocol,
                counts=self._counts,
                num_open=lambda: len(self.server_state.connections),
            )
            self.servers.append(acceptor)  # type: ignore[arg-type]

    def _make_protocol(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class  # the partial of Listener
        return make(self.config, self.server_state, self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def allow_connections() -> int:
    """How many connections this process may have open: as many as its file handles allow, once it has asked for all that it may
    have. Says what to do when these are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = max(SPARE_HANDLES, soft - SPARE_HANDLES)
    if most < WANTED_CONNECTIONS:
        log.warning(
            "at most %d connections per HTTP process: it may have %d open files. Raise the limit with `ulimit -Hn %d` before the "
            "start, LimitNOFILE= in a systemd unit, or --ulimit nofile= of the container",
            most,
            soft,
            WANTED_CONNECTIONS + SPARE_HANDLES,
        )
    return most


class Listener:
    """Serves `app` on a listening socket until `stop`, to at most `max_connections` at a time. Several that serve one socket share
    its connections by their `counts`."""

    def __init__(
        self,
        app: ASGIApp,
        listening: socket.socket,
        *,
        max_connections: int = WANTED_CONNECTIONS,
        counts: ConnectionCounts | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=functools.partial(LimitedProtocol, max_connections=max_connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            loop="none",
            access_log=False,
            log_config=None,
            log_level="error",  # a line for each request that is none would let strangers fill the log
            server_header=False,
            date_header=True,
            proxy_headers=False,
            timeout_keep_alive=IDLE_TIMEOUT_S,
            backlog=2048,
        )
        self._server = _Server(config, counts)
        self._socket = listening
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)  # connections inherit it
        self._task: asyncio.Task[None] | None = None

    @property
    def has_started(self) -> bool:
        return bool(self._server.started)

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Returns when connections are being accepted."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while starting")
            await asyncio.sleep(0.005)

    async def stop(self, timeout_s: float) -> None:
        """Closes the listening socket and idle connections, waits for answers under way, then drops the rest."""
        if self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait((self._task,), timeout=timeout_s)
        if not done:
            self._server.force_exit = True
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            await asyncio.wait((self._task,), timeout=1.0)

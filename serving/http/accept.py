"""Takes connections from a listening socket into a protocol, and leaves alone what this process has no handle for.

Used by serving/http/listener.py, on its loop. Event loops differ in what they do when the system's limit on open files is
reached; one resets whoever comes. Here whoever comes stays in the system's queue, where another front end may take them. So
does who comes to one that has more connections than another: all wake for each, and the one that is first would take most of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable

from trireme.serving.http.connections import RENEW_S, ConnectionCounts

log = logging.getLogger(__name__)

RETRY_S = 0.25
YIELD_S = 0.002  # for which those with fewer connections may go first,
YIELDS = 5  # and so many times for one connection
RESERVE = 16  # handles that connections leave to the process itself
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts from its making until `close`, which leaves the listening socket open. One connection at a time, so that front ends
    that listen on one socket share what comes; those that tell each other their `counts` share it evenly. `num_open` is how many
    this one has."""

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        counts: ConnectionCounts | None = None,
        num_open: Callable[[], int] = lambda: 0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._counts = counts
        self._num_open = num_open
        self._num_yields = 0
        self._yielded_at = 0.0
        self._renewal: asyncio.TimerHandle | None = None
        self._listening = listening
        self._make_protocol = make_protocol
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False
        listening.setblocking(False)
        self._resume()
        self._renew()

    def close(self) -> None:
        """Stops accepting at once; does not wait for connections that are being handed over."""
        if self._renewal is not None:
            self._renewal.cancel()
        if self._counts is not None:
            self._counts.leave()
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Returns when whoever was accepted has been handed over."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._on_readable)

    def _renew(self) -> None:
        if self._counts is not None:
            self._tell(self._counts)
            self._renewal = self._loop.call_later(RENEW_S, self._renew)

    def _tell(self, counts: ConnectionCounts) -> int:
        if self._is_full:
            counts.leave()  # nobody need wait for this one
        num_open = self._num_open() + len(self._tasks)
        if not self._is_full:
            counts.tell(num_open)
        return num_open

    def _yields(self) -> bool:
        """Whether to leave a connection to another front end for now: one that has fewer, and has not had its turns."""
        if self._counts is None:
            return False
        num_open, least = self._tell(self._counts), self._counts.least_of_others()
        if least is None or num_open <= least:
            return False
        now = self._loop.time()
        if now - self._yielded_at > RETRY_S:
            self._num_yields = 0  # those were for another connection
        self._yielded_at = now
        self._num_yields += 1
        return self._num_yields <= YIELDS

    def _on_readable(self) -> None:
        if self._yields():
            self._look_later(YIELD_S)
            return
        self._num_yields = 0
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._rest(str(error))
            return
        if connection.fileno() + RESERVE >= _limit():
            self._rest("few handles are left")
        else:
            self._is_full = False
        task = self._loop.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _rest(self, why: str) -> None:
        """Looks again in a moment."""
        if not self._is_full:
            log.warning("connections have to wait, %d open files are allowed: %s", _limit(), why)
        self._is_full = True
        self._look_later(RETRY_S)

    def _look_later(self, delay_s: float) -> None:
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(delay_s, self._resume)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:  # it has left already
            log.debug("a connection ended at once: %s", error)
            connection.close()


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

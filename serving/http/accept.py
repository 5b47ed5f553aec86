"""Takes connections from a listening socket into a protocol, and leaves alone what this process has no handle for.

Used by serving/http/listener.py, on its loop. Event loops differ in what they do when the system's limit on open files is
reached; one resets whoever comes. Here whoever comes stays in the system's queue, where another front end may take them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable

log = logging.getLogger(__name__)

RETRY_S = 0.25
RESERVE = 16  # handles that connections leave to the process itself
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts from its making until `close`, which leaves the listening socket open. One connection at a time, so that front ends
    that listen on one socket share what comes."""

    def __init__(self, listening: socket.socket, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make_protocol = make_protocol
        self._pause: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_full = False
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Returns when whoever was accepted has been handed over."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._on_readable)

    def _on_readable(self) -> None:
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
        self._loop.remove_reader(self._listening)
        self._pause = self._loop.call_later(RETRY_S, self._resume)

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

"""Front ends of one deployment tell each other their numbers, so that a scrape of any of them sees all.

Each listens on a socket file in the private run directory and writes its snapshot to whoever connects. What it has told anybody,
and what it had counted a moment ago, lies in a file beside: so a counter never falls, whether its front end is too busy to answer,
dies, or starts again (it goes on from there). Called by serving/main.py and serving/front.py; nothing but numbers passes here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from trireme.serving.metrics.telemetry import Snapshot, inherited, merged

ASK_TIMEOUT_S = 0.5
SAVE_S = 0.5  # between two saves: what a death may lose
MAX_BYTES = 1 << 20


class Aggregation:
    """`num_fronts` front ends, of which this is number `index`. One that `is_alone` has a port of its own and tells only its own
    numbers."""

    def __init__(
        self, run_dir: str, index: int, num_fronts: int, snapshot: Callable[[], Snapshot], *, is_alone: bool = False
    ) -> None:
        self._directory = Path(run_dir)
        self._index = index
        self._others = [] if is_alone else [i for i in range(num_fronts) if i != index]
        self._snapshot = snapshot
        self._server: asyncio.Server | None = None
        self._saving: asyncio.Task[None] | None = None
        self._before: Snapshot | None = None  # of all former lives
        self._saved = b""

    async def start(self) -> None:
        """Loads the saved counters of former lives and listens for the other front ends. Raises OSError."""
        last = self._kept(self._index)
        self._before = inherited(last) if last is not None else None
        self._saving = asyncio.ensure_future(self._save_often())
        if self._others:
            path = self._socket_of(self._index)
            Path(path).unlink(missing_ok=True)  # of a former life under this name
            self._server = await asyncio.start_unix_server(self._tell, path)

    def close(self) -> None:
        """Saves the counters and removes the socket."""
        if self._saving is not None:
            self._saving.cancel()
            self.own()
        if self._server is not None:
            self._server.close()
            Path(self._socket_of(self._index)).unlink(missing_ok=True)

    def own(self) -> Snapshot:
        """This front end's numbers, with those of its former lives; saved before anybody hears of them."""
        now = self._snapshot()
        found = merged([self._before, now]) if self._before is not None else now
        data = msgspec.msgpack.encode(found)
        if data != self._saved and self._save(data):
            self._saved = data
        return found

    async def snapshots(self) -> list[Snapshot]:
        """This front end's numbers and those of its siblings; of one that does not answer, the last ones known."""
        answers = await asyncio.gather(*map(self._ask, self._others))
        return [self.own(), *(answer for answer in answers if answer is not None)]

    # ------------------------------------------------------------ files

    def _socket_of(self, index: int) -> str:
        return str(self._directory / f"front-{index}.stats")

    def _file_of(self, index: int) -> Path:
        return self._directory / f"front-{index}.kept"

    def _save(self, data: bytes) -> bool:
        fresh = self._directory / f"front-{self._index}.fresh"
        try:
            fresh.write_bytes(data)
            os.replace(fresh, self._file_of(self._index))
        except OSError:
            return False
        return True

    async def _save_often(self) -> None:
        while True:
            self.own()
            await asyncio.sleep(SAVE_S)

    def _kept(self, index: int) -> Snapshot | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.msgpack.decode(self._file_of(index).read_bytes(), type=Snapshot)
        return None

    # ------------------------------------------------------------ sockets

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(msgspec.msgpack.encode(self.own()))
            await writer.drain()
        writer.close()

    async def _ask(self, index: int) -> Snapshot | None:
        writer = None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(self._socket_of(index))
                data = b""
                while len(data) < MAX_BYTES and (part := await reader.read(1 << 16)):
                    data += part
                return msgspec.msgpack.decode(data, type=Snapshot)
        except (ConnectionRefusedError, FileNotFoundError):  # nobody listens: it is gone
            last = self._kept(index)
            return inherited(last) if last is not None else None
        except (OSError, TimeoutError, msgspec.MsgspecError):  # busy, or just now gone
            return self._kept(index)
        finally:
            if writer is not None:
                writer.close()

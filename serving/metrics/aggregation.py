"""Front ends of one deployment tell each other their numbers, so that a scrape of any of them sees all.

Each listens on a socket file in the private run directory and writes its snapshot to whoever connects. Called by
serving/main.py and serving/app.py; nothing but numbers passes here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from trireme.serving.metrics.telemetry import Snapshot

ASK_TIMEOUT_S = 0.5
MAX_BYTES = 1 << 20


class Aggregation:
    """`num_fronts` front ends, of which this is number `index`."""

    def __init__(self, run_dir: str, index: int, num_fronts: int, snapshot: Callable[[], Snapshot]) -> None:
        self._paths = [str(Path(run_dir) / f"front-{i}.stats") for i in range(num_fronts)]
        self._index = index
        self._snapshot = snapshot
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        if len(self._paths) > 1:
            path = self._paths[self._index]
            Path(path).unlink(missing_ok=True)  # of a former life under this name
            self._server = await asyncio.start_unix_server(self._tell, path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            Path(self._paths[self._index]).unlink(missing_ok=True)

    async def snapshots(self) -> list[Snapshot]:
        """This front end's numbers and those of every sibling that answers in time."""
        others = [path for i, path in enumerate(self._paths) if i != self._index]
        answers = await asyncio.gather(*map(self._ask, others))
        return [self._snapshot(), *(answer for answer in answers if answer is not None)]

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(msgspec.msgpack.encode(self._snapshot()))
            await writer.drain()
        writer.close()

    async def _ask(self, path: str) -> Snapshot | None:
        writer = None
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                reader, writer = await asyncio.open_unix_connection(path)
                data = b""
                while len(data) < MAX_BYTES and (part := await reader.read(1 << 16)):
                    data += part
                return msgspec.msgpack.decode(data, type=Snapshot)
        except (OSError, TimeoutError, msgspec.MsgspecError):
            return None
        finally:
            if writer is not None:
                writer.close()

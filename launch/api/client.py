"""`Client` and `AsyncClient`: the engines of a running `trireme serve` over its own sockets, without HTTP.

A program of the same user on the same machine joins the deployment as one more frontend: typed messages, its own
tokenizer, streams, cancellation. The server leaves a connection file in its private directory; whoever can read it may connect.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.api.session import AsyncSession, Session
from trireme.launch.api.startup import Life
from trireme.launch.api.view import ProgressView
from trireme.launch.processes.connection_file import PASS_NAME
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.connect import client_over_sockets
from trireme.transport.process.rundir import LOCK_NAME, PREFIX
from trireme.transport.wire.messages import Boot


class AsyncClient(AsyncSession):
    """`async with AsyncClient() as client: ...` finds the one running server; give its directory when there are several.

    The directory is in the server's ready panel. Raises ConfigError when there is no such server.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        boot = read_pass(Path(directory) if directory is not None else find_server())
        config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
        super().__init__(config, [], _Attached(boot, config), ProgressView(False))


class Client(Session):
    """The blocking twin of AsyncClient."""

    def __init__(self, directory: str | Path | None = None) -> None:
        super().__init__(AsyncClient(directory))


def read_pass(directory: Path) -> Boot:
    """The Boot from the connection file in a server's directory, under a client name of our own."""
    try:
        boot = msgspec.msgpack.decode((directory / PASS_NAME).read_bytes(), type=Boot)
    except OSError as error:
        raise ConfigError(f"no server keeps its sockets in {directory}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{directory / PASS_NAME} was written by another version: {error}") from error
    return msgspec.structs.replace(boot, name=f"client-{os.getpid()}-{secrets.token_hex(4)}")


def find_server() -> Path:
    """The directory of this user's only server. Raises ConfigError when there is none, or more than one."""
    found = [
        path.parent
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK_NAME}")
        if path.stat().st_uid == os.getuid() and (path.parent / PASS_NAME).exists()
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError("no server of this user is running on this machine", hint="trireme serve MODEL")
    names = ", ".join(str(path) for path in found)
    raise ConfigError(f"{len(found)} servers are running: {names}", hint=f"Client({str(found[0])!r})")


class _Attached:
    """A deployment started, and eventually stopped, by someone else."""

    def __init__(self, boot: Boot, config: EngineConfig) -> None:
        self._boot = boot
        self._config = config
        self.lives: dict[str, Life] = {}  # empty: it did not start the engines

    def start(self) -> None:
        pass

    def client(self) -> EngineClient:
        return client_over_sockets(self._boot, self._config)

    def close(self) -> None:
        pass

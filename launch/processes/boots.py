"""What a process of a deployment is told when it starts: its Boot. Used by supervisor.py.

Owns what all processes of one deployment share: the listening sockets, the run directory and the keys of its sockets.
"""

from __future__ import annotations

import hashlib

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.processes.listeners import Listeners
from trireme.launch.processes.lockstep_memory import LockstepMemory
from trireme.settings import without_keys
from trireme.topology.lockstep import Mode
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.address import make_secret_keys
from trireme.transport.wire.messages import Boot, Role


class Boots:
    """Makes Boots once it is open. Only those of frontends have the API keys, since nobody else checks them."""

    def __init__(self, config: EngineConfig, lockstep_memory: LockstepMemory) -> None:
        self.listeners = Listeners()
        self._config = config
        self._whole_config = msgspec.msgpack.encode(config)
        self._public_config = msgspec.msgpack.encode(without_keys(config))
        self._lockstep_memory = lockstep_memory
        self._run_dir: RunDir | None = None
        self._secret_keys: dict[str, bytes] = {}

    @property
    def is_open(self) -> bool:
        return self._run_dir is not None

    def open(self, *, has_fronts: bool) -> None:
        """Binds the listening sockets, then makes the run directory. Raises ConfigError when an address is unavailable."""
        if has_fronts:
            self.listeners.open(self._config)
        self._run_dir = RunDir()
        if self._config.launch.transport == "tcp":
            self._secret_keys = make_secret_keys()

    def for_client(self, role: Role, name: str, index: int = 0, epoch: int = 0, pause: Mode = "") -> Boot:
        """A Boot without API keys. Raises ConfigError before `open`."""
        if self._run_dir is None:
            raise ConfigError("the deployment has not been started")
        return Boot(
            role=role,
            name=name,
            epoch=epoch,
            config=self._public_config,
            config_hash=hashlib.sha256(self._public_config).digest(),
            run_dir=self._run_dir.path,
            index=index,
            listen_fd=self.listeners.fileno(index) if role == "front" else -1,
            secret_keys=self._secret_keys,
            peers=self._lockstep_memory.path if role == "engine" else "",
            pause=pause,
        )

    def for_part(self, role: Role, name: str, index: int, epoch: int, pause: Mode) -> Boot:
        """The Boot of a part of the deployment itself."""
        boot = self.for_client(role, name, index, epoch, pause)
        return msgspec.structs.replace(boot, config=self._whole_config) if role == "front" else boot

    def close(self) -> None:
        """Closes the sockets and removes all files. May be called twice."""
        self.listeners.close()
        if self._run_dir is not None:
            self._run_dir.remove()

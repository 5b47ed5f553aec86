"""One part of a deployment (coordinator, engine, frontend) over its incarnations. Used by supervisor.py, one object per part."""

from __future__ import annotations

from typing import Literal, TypeAlias

from trireme.launch.processes.beats import Beats
from trireme.launch.processes.restarts import RestartLimits, Restarts
from trireme.topology.lockstep import Mode
from trireme.transport.process.boot import Child
from trireme.transport.sockets.poller import NEVER
from trireme.transport.wire.messages import Failed, Progress, Ready, Role

PartState: TypeAlias = Literal["new", "starting", "ready", "waiting", "down", "stopped"]


class ManagedProcess:
    """One part of the deployment over its incarnations."""

    def __init__(self, role: Role, index: int, name: str, module: str, limits: RestartLimits, beats: Beats) -> None:
        self.role = role
        self.index = index
        self.name = name
        self.module = module
        self.epoch = -1
        self.state: PartState = "new"
        self.child: Child | None = None
        self.ready: Ready | None = None
        self.failed: Failed | None = None  # of its last death
        self.restarts = Restarts(limits)
        self.started_at = 0.0
        self.ready_at = 0.0
        self.start_s = 0.0  # duration of its last start
        self.restart_at = NEVER
        self.last_progress: Progress | None = None
        self.pause: Mode = ""  # of an engine, over its incarnations
        self.beats = beats
        self.is_hurried = False  # a frontend told to end its requests at once

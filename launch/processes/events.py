"""What happens to a deployment, as its supervisor reports it to its owner (a console, LLM, a test)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from trireme.transport.wire.messages import Failed, Progress, Ready


class Died(msgspec.Struct, frozen=True):
    """A part died after the first start. `restart_s`: seconds until its restart; None: it stays down."""

    name: str
    error: str
    restart_s: float | None
    num_recent: int
    failed: Failed | None = None


class AllReady(msgspec.Struct, frozen=True):
    """Every part has sent Ready for the first time. `address` is (host, port), None without frontends; the timestamps are
    readings of time.monotonic."""

    address: tuple[str, int] | None
    parts: dict[str, Ready]
    seconds: float
    ready_at: dict[str, float] = {}
    addresses: list[tuple[str, int]] = []  # all of them
    born_at: dict[str, float] = {}  # when each part's process was ordered


class Restarted(msgspec.Struct, frozen=True):
    """A part that had died is ready again."""

    name: str
    epoch: int


class Stopping(msgspec.Struct, frozen=True):
    """The drain has begun."""

    reason: str
    deadline_s: float


class Stopped(msgspec.Struct, frozen=True):
    """The last event. `failed` is the root cause, to be printed once, now."""

    exit_code: int
    failed: Failed | None


Event: TypeAlias = Progress | Ready | Died | AllReady | Restarted | Stopping | Stopped

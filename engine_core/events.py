"""Events of an EngineCore as data: recorded while it runs, stored, and replayed into another core, which must make the same plans.

Used by tests/replay and for failure reports. A log is self-contained: it starts with the limits.
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme.engine_core.core import EngineCore
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.transport.wire.codec import decode, encode
from trireme.transport.wire.messages import StepPlan, StepResult, Submit, Wire


class Began(Wire, frozen=True):
    limits: Limits
    depth: int
    policy: str
    ahead: bool = False


class Submitted(Wire, frozen=True):
    now: float
    front: str
    submit: Submit


class Aborted(Wire, frozen=True):
    front: str
    rids: list[int]


class FrontGone(Wire, frozen=True):
    front: str


class AskedBack(Wire, frozen=True):
    """Waiting sequences were returned to their frontends."""

    now: float
    count: int
    to: int


class Ticked(Wire, frozen=True):
    now: float


class Planned(Wire, frozen=True):
    """`next_plan` was called."""

    now: float


class Answered(Wire, frozen=True):
    now: float
    result: StepResult


Event = Began | Submitted | Aborted | FrontGone | AskedBack | Ticked | Planned | Answered

_SIZE_BYTES = 4


def core_from(began: Began, *, check: bool = False) -> EngineCore:
    """A fresh core with the recorded configuration."""
    return EngineCore(began.limits, depth=began.depth, ahead=began.ahead, check=check, policy=began.policy)


def apply(core: EngineCore, event: Event) -> StepPlan | None:
    """Feeds one event to a core; returns the plan if the event asked for one."""
    match event:
        case Submitted():
            core.submit(event.front, event.submit, event.now)
        case Aborted():
            core.abort(event.front, event.rids)
        case FrontGone():
            core.front_gone(event.front)
        case AskedBack():
            core.reclaim(event.count, event.to, event.now)
        case Ticked():
            core.tick(event.now)
        case Answered():
            core.on_result(event.result, event.now)
        case Planned():
            return core.next_plan(event.now)
        case Began():
            raise ValueError("a log begins once")
    return None


def plans_of(events: Iterable[Event]) -> list[bytes]:
    """Replays a log into a fresh core; returns its encoded plans."""
    remaining = iter(events)
    began = next(remaining)
    if not isinstance(began, Began):
        raise ValueError(f"a log begins with Began, not {type(began).__name__}")
    core = core_from(began)
    plans = (apply(core, event) for event in remaining)
    return [bytes(encode(plan)[0]) for plan in plans if plan is not None]


def log_from_events(events: Iterable[Event]) -> bytes:
    """Encodes events, each with a length prefix. Arrays must be small enough to travel inline."""
    parts: list[bytes] = []
    for event in events:
        (body,) = encode(event)
        parts += [len(body).to_bytes(_SIZE_BYTES, "little"), bytes(body)]
    return b"".join(parts)


def events_from_log(log: bytes) -> list[Event]:
    """The inverse of `log_from_events`. Raises ProtocolError for malformed bytes."""
    events, at = [], 0
    while at < len(log):
        size = int.from_bytes(log[at : at + _SIZE_BYTES], "little")
        at += _SIZE_BYTES
        events.append(decode([log[at : at + size]], Event))
        at += size
    return events

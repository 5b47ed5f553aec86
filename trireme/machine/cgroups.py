"""Limits of this process's control groups: memory and CPU time, for cgroup v1, v2 and both at once.

Used by trireme.machine.device and workers.cpu.memory. A limit may be set on our own group or on any ancestor, so all are read,
from our own up to the root of the mount. Pure functions over a root directory, which tests replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60  # bytes; cgroup v1 writes a number near 2^63 for "no limit"
_USUAL_PLACE = "sys/fs/cgroup"  # mount point, when /proc/self/mountinfo cannot be read
_USUAL_GROUPS = "0::/\n1:memory:/\n2:cpu:/\n"  # when /proc/self/cgroup cannot be read
_MOST_SEARCHED = 4096  # groups searched for our pid


class GroupLimits(NamedTuple):
    """The minimum over all groups; None: no group sets it. Memory in bytes, CPU time in cores."""

    memory: int | None = None
    memory_free: int | None = None  # limit minus the group's usage, not counting file pages that the kernel can drop
    cpus: float | None = None


class _Mount(NamedTuple):
    """A mounted hierarchy. `top` is the group visible at `point`; `controllers` is empty for cgroup v2."""

    top: str
    point: str
    controllers: frozenset[str]


class _Files(NamedTuple):
    """File names of one cgroup version. `cached` are the memory.stat entries for file pages that can be dropped."""

    limits: tuple[str, ...]
    usage: str
    cached: tuple[str, ...]


_V1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def read_limits(root: Path = Path("/")) -> GroupLimits:
    """The limits in force for this process. Missing or unreadable files set no limit."""
    memory, free, cpus = list[int](), list[int](), list[float]()
    for place, files in _groups(root, "memory"):
        stat = _table(_text(place / "memory.stat"))
        used = _number(_text(place / files.usage)) or 0
        cached = sum(stat.get(row, 0) for row in files.cached)
        limits = [_number(_text(place / name)) for name in files.limits]
        limits.append(stat.get("hierarchical_memory_limit"))  # v1: includes ancestors that a container cannot see
        for limit in limits:
            if limit is not None and limit < _UNLIMITED:
                memory.append(limit)
                free.append(max(0, limit - max(0, used - cached)))
    for place, files in _groups(root, "cpu"):
        quota = _quota_v2(place) if files is _V2 else _quota_v1(place)
        cpus += [] if quota is None else [quota]
    return GroupLimits(min(memory, default=None), min(free, default=None), min(cpus, default=None))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, _Files]]:
    """Directories of our group and its ancestors, in every hierarchy that may limit `controller`."""
    mounts = _mounts(root)
    for line in (_text(root / "proc/self/cgroup") or _USUAL_GROUPS).splitlines():
        words = line.split(":", 2)
        if len(words) != 3:
            continue
        names = frozenset(filter(None, words[1].split(",")))
        if names and controller not in names:
            continue
        for mount in mounts:
            if bool(mount.controllers) == bool(names) and (not names or controller in mount.controllers):
                top = root / mount.point.lstrip("/")
                inside = below(words[2], mount.top)
                if inside is None:
                    inside = _searched(root, top, words[2], mount.top)
                yield from ((place, _V1 if names else _V2) for place in _climb(top, inside))


def _mounts(root: Path) -> list[_Mount]:
    """The mounted hierarchies; the usual mount points if the system does not list them."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        own, _, rest = line.partition(" - ")
        before, after = own.split(" "), rest.split(" ")
        if len(before) >= 5 and len(after) >= 3 and after[0] in ("cgroup", "cgroup2"):
            controllers = frozenset(after[2].split(",")) if after[0] == "cgroup" else frozenset[str]()
            found.append(_Mount(_unescaped(before[3]), _unescaped(before[4]), controllers))
    if found:
        return found
    usual = [_Mount("/", f"{_USUAL_PLACE}/{name}", frozenset({name})) for name in ("memory", "cpu")]
    return [*usual, *(_Mount("/", place, frozenset()) for place in (_USUAL_PLACE, f"{_USUAL_PLACE}/unified"))]


def _unescaped(text: str) -> str:
    """Decodes the octal escapes that mountinfo uses for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def below(group: str, top: str) -> list[str] | None:
    """Path components from the group `top`, which a mount shows, down to our `group`; None where the paths do not determine them.

    Both are relative to the root of our cgroup namespace and begin with `/..` for each group above it.
    """
    ups, names = _steps(group)
    top_ups, top_names = _steps(top)
    if ups == top_ups and names[: len(top_names)] == top_names:
        return names[len(top_names) :]
    return None


def _searched(root: Path, top: Path, group: str, top_group: str) -> list[str]:
    """Like `below`, for a mount made outside our namespace: the components lead to the group that lists our pid. [] where there
    is none: we were moved out of what the mount shows, so only its top is known."""
    (ups, names), (top_ups, top_names) = _steps(group), _steps(top_group)
    if top_names or top_ups <= ups:
        return []
    pid = _text(root / "proc/self/stat").partition(" ")[0]
    pattern = "/".join([*["*"] * (top_ups - ups), *names])
    for place in islice(top.glob(pattern), _MOST_SEARCHED):
        if pid and pid in _text(place / "cgroup.procs").split():
            return list(place.relative_to(top).parts)
    return []


def _steps(path: str) -> tuple[int, list[str]]:
    """How many groups above the namespace's root a path begins, and the names from there down."""
    ups, names = 0, list[str]()
    for part in filter(None, path.split("/")):
        if part != "..":
            names.append(part)
        elif names:
            names.pop()
        else:
            ups += 1
    return ups, names


def _climb(top: Path, names: list[str]) -> Iterator[Path]:
    """Directories of the group and its ancestors, up to `top`; missing ones are skipped."""
    for depth in range(len(names), -1, -1):
        place = top.joinpath(*names[:depth])
        if place.is_dir():
            yield place


def _quota_v2(place: Path) -> float | None:
    words = _text(place / "cpu.max").split()
    return _share(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(place: Path) -> float | None:
    return _share(_text(place / "cpu.cfs_quota_us").strip(), _text(place / "cpu.cfs_period_us").strip())


def _share(quota: str, period: str) -> float | None:
    """CPU quota in cores; `max` and -1 are no limit."""
    if not (quota.isdecimal() and period.isdecimal() and int(period) > 0):
        return None
    return int(quota) / int(period)


def _table(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    return {words[0]: int(words[1]) for words in rows if len(words) == 2 and words[1].isdecimal()}


def _number(text: str) -> int | None:
    """A limit or usage in bytes; None for `max`, for v1's "no limit" and for an empty text."""
    text = text.strip()
    return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cores(mask: int, limits: GroupLimits) -> int:
    """How many of `mask` processors can be busy all the time under a quota, at least one. A fraction does not count: threads that
    synchronise would all stall for the rest of each period."""
    return mask if limits.cpus is None else max(1, min(mask, int(limits.cpus)))

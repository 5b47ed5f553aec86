"""Facts of this machine: free memory under the kernel's and the container's limits, usable cores, a worker's fair share.

Called by workers.cpu.worker. Reads /proc and /sys only; every reader takes its root directory, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trireme.machine.memory_budget import LOGITS_BYTES as LOGITS_BYTES
from trireme.machine.memory_budget import activation_bytes as activation_bytes

MIB = 1 << 20
_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"
_SPARE = 0.10  # of all memory: left to the kernel, front ends and whatever else runs


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes. `total` and `available` are within the container's limit when there is one."""

    total: int
    available: int
    own: int  # held by this process; pages of mapped files, which the kernel can drop, do not count


def read_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Memory of the machine, cut to the limits of the control groups that this process is in."""
    info = _read_table(proc / "meminfo")
    total, available = info["MemTotal"], info["MemAvailable"]
    for limit, used in _group_limits(proc, cgroup):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    status = _read_table(proc / "self/status")
    return MemoryFacts(total, available, status.get("RssAnon", 0) + status.get("RssShmem", 0))


def _read_table(path: Path) -> dict[str, int]:
    """`Name:   123 kB` lines, in bytes."""
    table = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            table[name] = int(words[0]) * 1024
    return table


def _group_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used without reclaimable page cache) of every group from ours up to the root, both cgroup versions."""
    limits = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _climb(cgroup, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            limits += _climb(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return limits


def _climb(root: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> list[tuple[int, int]]:
    place = root / path.lstrip("/")
    limits = []
    while place == root or root in place.parents:
        limit, used = _text(place / limit_name).strip(), _text(place / used_name).strip()
        if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
            stat = dict(line.split() for line in _text(place / "memory.stat").splitlines())
            limits.append((int(limit), max(0, int(used) - int(stat.get(cache_name, 0)))))
        place = place.parent
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its CPU mask, cut to a container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _text(cgroup / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def kv_share(facts: MemoryFacts, step_bytes: int, num_workers: int, num_engine_workers: int) -> int:
    """Bytes that this worker can give to KV blocks, once its weights are loaded.

    The workers of a machine load at the same time, so what is free at any moment says little about the others; each takes
    an equal part of all memory less what it already holds. An engine that restarts alone beside others is kept from
    overcommitting by the second bound: what is free now, shared by the workers of its engine.
    """
    spare = max(int(_SPARE * facts.total), 256 * MIB)
    fair = (facts.total - spare) // num_workers - facts.own - step_bytes
    free = (facts.available - spare) // num_engine_workers - step_bytes
    return max(0, min(fair, free))

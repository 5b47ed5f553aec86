"""Facts of this machine: free memory under the kernel's and the container's limits, usable cores, a worker's share.

Called by workers.cpu.worker. Reads /proc and /sys only; every reader takes its root directory, for tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from trireme.machine.cgroups import read_limits
from trireme.machine.cgroups import usable_cores as cores_within
from trireme.machine.memory_budget import LOGITS_BYTES as LOGITS_BYTES
from trireme.machine.memory_budget import activation_bytes as activation_bytes

MIB = 1 << 20
_SPARE = 0.10  # of all memory: left to the kernel, frontends and other processes


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes. `total` and `available` are within the container's limit when there is one."""

    total: int
    available: int
    own: int  # held by this process; pages of mapped files, which the kernel can drop, do not count


def read_memory(root: Path = Path("/")) -> MemoryFacts:
    """Memory of the machine, within the limits of this process's control groups."""
    info, limits = _read_table(root / "proc/meminfo"), read_limits(root)
    total, available = info["MemTotal"], info["MemAvailable"]
    if limits.memory is not None:
        total = min(total, limits.memory)
    if limits.memory_free is not None:
        available = min(available, limits.memory_free)
    status = _read_table(root / "proc/self/status")
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


def usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may use: its CPU mask, limited by a container's quota."""
    return cores_within(len(os.sched_getaffinity(0)), read_limits(root))


def kv_share(facts: MemoryFacts, step_bytes: int, num_workers: int, num_engine_workers: int) -> int:
    """Bytes that this worker can give to KV blocks, once its weights are loaded.

    The workers of a machine load at the same time, so the free memory at any moment says little about the others; each takes
    an equal part of all memory less what it already holds. The second bound keeps an engine that restarts alone beside others from
    overcommitting: the memory free now, shared by the workers of its engine.
    """
    spare = max(int(_SPARE * facts.total), 256 * MIB)
    fair = (facts.total - spare) // num_workers - facts.own - step_bytes
    free = (facts.available - spare) // num_engine_workers - step_bytes
    return max(0, min(fair, free))

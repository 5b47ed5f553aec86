"""CPU starvation, sampled from /proc: on a busy machine, elapsed time alone does not tell a stuck process from one that was not
scheduled.

Used by watchdogs before they kill a process. A thread counts as starved if it is runnable at a sample and has not run since the
previous one. A thread that waits for something else, or spins, is not starved.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

LONGEST_GAP_S = 2.0  # between two consecutive samples: what happened in a longer gap is unknown
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Starvation:
    """Samples the same processes, or others each time. One thread only, which is excluded from its own samples."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._used_s: dict[int, float] = {}  # CPU time by thread, at the last sample

    def look(self, now: float, pids: Iterable[int]) -> float:
        """Of the seconds since the last sample, those that the worst-off thread was starved. 0 at the first sample, after a long
        gap, and where the system does not tell."""
        passed_s, self._looked = now - self._looked, now
        before, self._used_s = self._used_s, {}
        worst_s = 0.0
        for pid in pids:
            for thread in _threads_of(pid):
                if thread == threading.get_native_id():
                    continue
                is_runnable, used_s = _read(pid, thread)
                self._used_s[thread] = used_s
                if is_runnable and thread in before:
                    worst_s = max(worst_s, passed_s - (used_s - before[thread]) - TICK_S)
        return worst_s if passed_s <= LONGEST_GAP_S else 0.0


def children_of(pid: int) -> list[int]:
    """Living children of this process; empty where the system does not tell."""
    found: list[int] = []
    for thread in _threads_of(pid):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def _threads_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _read(pid: int, thread: int) -> tuple[bool, float]:
    """Whether a thread is runnable, and its CPU time."""
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            fields = file.read(1024).rpartition(b")")[2].split()
        return fields[0] == b"R", (int(fields[11]) + int(fields[12])) * TICK_S
    except (OSError, IndexError, ValueError):
        return False, 0.0

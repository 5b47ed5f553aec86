"""How long processes wanted a processor and had none, by looks at /proc: on a machine that others keep busy, time alone does not
tell what is stuck from what has not had its turn.

Used by whoever gives up processes that make no progress. A thread counts that is runnable at a look and has not run for as long as
has passed since the look before. What waits for something else, or runs in circles, is not starved.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable

LONGEST_GAP_S = 2.0  # between two looks that belong together: what happened in a longer one is not known
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Starvation:
    """Looks at the same processes, or at others each time. One thread only, which is left out of its own looks."""

    def __init__(self) -> None:
        self._looked = float("-inf")
        self._used_s: dict[int, float] = {}  # processor time by thread, at the last look

    def look(self, now: float, pids: Iterable[int]) -> float:
        """Of the seconds since the last look, those which the thread that is worst off was without a processor. 0 at the first look
        and after a long gap, and where the system does not tell."""
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
    """Processes that this one has started and that live; empty where the system does not tell."""
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
    """Whether a thread is runnable, and the processor time that it has used."""
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            fields = file.read(1024).rpartition(b")")[2].split()
        return fields[0] == b"R", (int(fields[11]) + int(fields[12])) * TICK_S
    except (OSError, IndexError, ValueError):
        return False, 0.0

"""Who is without a processor, by looks at real processes: one that hardly gets any, one that runs in circles, one that waits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from trireme.launch.processes.beats import Beats
from trireme.machine.starvation import LONGEST_GAP_S, Starvation, children_of

IN_CIRCLES = "while True: pass"
WAITING = "import time\ntime.sleep(1000)"
NUM_HOGS = 6  # of one processor, beside the one that is looked at


@contextlib.contextmanager
def running(*programs: str) -> Iterator[list[int]]:
    """Each in a session of its own, since the system may share out processors by session."""
    started = [subprocess.Popen([sys.executable, "-c", program], start_new_session=True) for program in programs]
    try:
        time.sleep(0.3)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def seen(pid: int) -> float:
    """The share of a good second in which it wanted a processor in vain."""
    starvation, began, lost_s = Starvation(), time.monotonic(), 0.0
    assert starvation.look(began, [pid]) == 0.0
    while (now := time.monotonic()) - began < 1.5:
        time.sleep(0.1)
        lost_s += starvation.look(time.monotonic(), [pid])
    return lost_s / (now - began)


def test_only_what_wants_a_processor_and_has_none_is_starved() -> None:
    core = min(os.sched_getaffinity(0))
    crowded = f"import os\nos.sched_setaffinity(0, {{{core}}})\n{IN_CIRCLES}"
    with running(*[crowded] * (1 + NUM_HOGS)) as pids:
        assert seen(pids[0]) > 0.5
    with running(WAITING) as pids:
        assert seen(pids[0]) == 0.0
        assert seen(2**22) == 0.0  # there is none


def test_the_time_of_what_runs_in_circles_is_its_own() -> None:
    with running(IN_CIRCLES) as (pid,):
        starvation = Starvation()
        starvation.look(0.0, [pid])
        used_s = -cpu_s(pid)
        began = time.monotonic()
        time.sleep(1.0)
        passed_s = time.monotonic() - began
        lost_s, used_s = starvation.look(passed_s, [pid]), used_s + cpu_s(pid)
        assert abs(passed_s - used_s - lost_s) < 0.1  # whatever else runs here


class Silent:
    """As much of a Child as its beats are judged by: a real process, last heard of now."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.last_beat = time.monotonic()


def test_a_silent_part_is_stuck_unless_it_had_no_processor() -> None:
    core = min(os.sched_getaffinity(0))
    crowded = f"import os\nos.sched_setaffinity(0, {{{core}}})\n{IN_CIRCLES}"
    with running(WAITING, *[crowded] * (1 + NUM_HOGS)) as pids:
        parts: list[tuple[Any, Beats]] = [(Silent(pid), Beats(stuck_s=3.5)) for pid in pids[:2]]
        began = time.monotonic()
        while time.monotonic() - began < 4.2:
            for child, beats in parts:
                beats.look(child, time.monotonic())
            time.sleep(0.1)
        assert [beats.is_stuck(child, time.monotonic()) for child, beats in parts] == [True, False]


def test_looks_far_apart_tell_nothing() -> None:
    with running(IN_CIRCLES) as (pid,):
        starvation = Starvation()
        starvation.look(100.0, [pid])
        assert starvation.look(100.0 + LONGEST_GAP_S + 0.1, [pid]) == 0.0


def test_children_are_found() -> None:
    with running(WAITING, WAITING) as pids:
        assert set(pids) <= set(children_of(os.getpid()))
    assert children_of(2**22) == []


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

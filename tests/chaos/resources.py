"""Resources taken from a running deployment: KV blocks, memory, descriptors, disk, processor time."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import psutil

from scripts.deployment import total_of
from scripts.streams import ask
from tests.chaos.site import Inject, Injury, Site, kill, part_of, send

HOGS, HOG_TOKENS = 12, 700
RUN_S, STOP_S = 0.01, 0.09  # CPU starved to 10 %
PLACE_BYTES, PLACE_FILES = 4 << 20, 256


@contextlib.contextmanager
def no_blocks(site: Site, rng: Random) -> Iterator[Injury]:
    """Long requests, each of which takes most of an engine's blocks, until every engine has had to take some back."""
    before = preemptions(site)
    body = site.bodies[0] | {"n": 1, "max_tokens": 64, "stop": None}
    injury = Injury()
    with ThreadPoolExecutor(HOGS) as pool:
        prompts = ["hog " * (HOG_TOKENS // 4) + str(rng.random()) for _ in range(HOGS)]
        hogs = [pool.submit(ask, site.deployment.port, body | {"prompt": prompt}) for prompt in prompts]
        yield injury
        injury.breaches += [
            f"a long request: {hog.end} {hog.detail}" for hog in (h.result() for h in hogs) if hog.end != "done"
        ]
    injury.is_done = preemptions(site) > before


def preemptions(site: Site) -> float:
    return total_of(site.deployment.get("/metrics")[1].splitlines(), "trireme_preemptions_total")


def limiting(kind: int, roles: tuple[str, ...]) -> Inject:
    """One process of a role may have no more of something than it has."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        role = rng.choice(roles)
        pid = site.pid(role, rng.randrange(2) if role in ("engine", "front") else 0)
        has = psutil.Process(pid).memory_info().vms if kind == resource.RLIMIT_AS else lowest_free(pid)
        soft, hard = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (has, hard))
        yield Injury(what=f"{role} has {has}")
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (soft, hard))

    return inject


def lowest_free(pid: int) -> int:
    """The number that its next file would get."""
    taken = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(taken) + 1) if number not in taken)


def filling(place: str, *roles: str) -> Inject:
    """A file system of the deployment is full, and a process of some role must be started again in that state."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        with filled(site.places[place]):
            role = rng.choice(roles)
            injury = Injury([part_of(role, 0)], kill(site.pid(role)), what=f"{role} killed")
            yield injury
            try:
                site.deployment.until_whole(30.0)
            except TimeoutError as error:
                injury.breaches.append(f"while it was full: {error}")

    return inject


@contextlib.contextmanager
def filled(place: Path) -> Iterator[None]:
    """No byte more and no file more."""
    made = [place / f"filler-{i}" for i in range(PLACE_FILES)]
    with contextlib.suppress(OSError), made[0].open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with contextlib.suppress(OSError):
        for path in made[1:]:
            path.touch()
    try:
        yield
    finally:
        for path in made:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def small_places(directory: Path) -> Iterator[dict[str, Path]]:
    """Small file systems in this process's own view: for run directories, with our stderr as a log on it, and as /dev/shm. This
    process must be alone in its mount namespace (tests/chaos/run.py)."""
    places = {"tmp": directory / "tmp", "shm": Path("/dev/shm")}
    places["tmp"].mkdir()
    options = f"size={PLACE_BYTES},nr_inodes={PLACE_FILES}"
    for place in places.values():
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)
    before, stderr = tempfile.tempdir, os.dup(2)
    log = os.open(places["tmp"] / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    tempfile.tempdir = str(places["tmp"])
    try:
        yield places
    finally:
        tempfile.tempdir = before
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(log)
        for place in places.values():
            subprocess.run(["umount", "-l", str(place)], check=True)


@contextlib.contextmanager
def starved(site: Site, rng: Random) -> Iterator[Injury]:
    """All processes of one engine run for a tenth of the time."""
    pid = site.pid("engine", rng.randrange(2))
    pids, over = [pid, *(child.pid for child in psutil.Process(pid).children())], threading.Event()

    def alternate() -> None:
        while not over.is_set():
            for number, pause_s in ((signal.SIGSTOP, STOP_S), (signal.SIGCONT, RUN_S)):
                for each in pids:
                    send(each, number)
                time.sleep(pause_s)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield Injury()
    finally:
        over.set()
        thread.join()

"""Runs the tests in two parts at once: those that watch real processes by the clock go first, those that compute fill the gaps.

`python scripts/run_tests.py [PYTEST ARGUMENTS]`, called by `make test`. The second part has a low priority, and what it says
follows when the first has ended. Exits with 1 when either fails; a part in which nothing is selected passes if the other selects
something. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
TIMED = (
    "chaos",
    "e2e",
    "procs",
    "replay",
    "serving",
    "workers/test_collectives.py",
    "workers/test_torch_dist.py",
)
"""Under tests/: what measures times, or stops and kills processes."""
NICENESS = 10  # a tenth of the share of others, so that no test starves where the machine is busy
NOTHING_SELECTED = 5  # of pytest's exit codes


def command(name: str, *arguments: str) -> list[str]:
    """pytest for one of the parts, which share no cache."""
    cache = f"cache_dir=.pytest_cache/{name}"
    return [sys.executable, "-m", "pytest", "-m", "not slow", "-o", cache, *arguments]


def give_way(pid: int) -> None:
    """The session of `pid` gets what processor time others leave."""
    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with suppress(OSError):  # where the kernel shares time out by sessions, their niceness counts
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))


def end(part: subprocess.Popen[bytes]) -> None:
    """With its workers."""
    if part.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGTERM)
        part.wait()


def interrupt(*_: int | FrameType | None) -> None:
    raise KeyboardInterrupt


def passed(codes: list[int]) -> bool:
    """Whether no part failed and at least one of them had something to run."""
    return set(codes) <= {0, NOTHING_SELECTED} and 0 in codes


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, interrupt)
    with tempfile.TemporaryFile() as said:
        computing = subprocess.Popen(
            command("computing", "tests", *(f"--ignore=tests/{name}" for name in TIMED), *arguments),
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            give_way(computing.pid)
            timed = subprocess.run(command("timed", *(f"tests/{name}" for name in TIMED), *arguments), cwd=ROOT)
            print("the tests that compute:", flush=True)
            codes = [timed.returncode, computing.wait()]
        except KeyboardInterrupt:
            return 130
        finally:
            end(computing)
            said.seek(0)
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    return 0 if passed(codes) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

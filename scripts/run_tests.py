"""Runs the tests as two concurrent parts: timing-sensitive process tests first, compute-bound ones at low priority in the gaps.

`python scripts/run_tests.py [PYTEST ARGUMENTS]`, called by `make test`. The second part runs at nice 10, and its output is
printed when the first has ended. Exits with 1 when either fails; a part in which nothing is selected passes if the other selects
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
"""Directories under tests/ that measure times, or stop and kill processes."""
NICENESS = 10  # CPU-heavy tests get a tenth of the default share, so that no timed test starves on a busy machine
NOTHING_SELECTED = 5  # pytest's exit code


def command(name: str, *arguments: str) -> list[str]:
    """The pytest command of one part; parts share no cache directory."""
    cache = f"cache_dir=.pytest_cache/{name}"
    return [sys.executable, "-m", "pytest", "-m", "not slow", "-o", cache, *arguments]


def give_way(pid: int) -> None:
    """Lowers the CPU priority of the session of `pid`."""
    os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    with suppress(OSError):  # with autogroup scheduling, the session's nice value counts
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))


def end(part: subprocess.Popen[bytes]) -> None:
    """Terminates a part and its pytest workers."""
    if part.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(part.pid, signal.SIGTERM)
        part.wait()


def interrupt(*_: int | FrameType | None) -> None:
    raise KeyboardInterrupt


def passed(codes: list[int]) -> bool:
    """True if no part failed and at least one of them had something to run."""
    return set(codes) <= {0, NOTHING_SELECTED} and 0 in codes


def main(arguments: list[str]) -> int:
    """Runs both parts; returns the exit status."""
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

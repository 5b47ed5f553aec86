"""Runs the tests in concurrent parts: two that watch real processes by the clock, and at low priority what computes.

`python scripts/run_tests.py [PYTEST ARGUMENTS]`, called by `make test`. The watching parts mostly wait, so they share a machine;
the others run at nice 10, and the tests of models wait until one of the former has ended, since two cores are busy until then.
The output of the first part is shown as it comes, that of the others at the end. Exits with 1 when any fails; a part in which
nothing is selected passes if another selects something. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PARTS: dict[str, tuple[str, ...]] = {
    "deployments": ("chaos", "e2e"),
    "processes": ("procs", "replay", "serving", "workers/test_collectives.py", "workers/test_torch_dist.py"),
}
"""Paths under tests/ that measure times, or stop and kill processes, by part; each is about half of the time."""
PURE = tuple(
    f"serving/test_{name}.py"
    for name in ("deltas", "detokenizer", "json_bounds", "processor", "tokens", "tokens_spm", "wire_openai")
)
"""Of these paths, what only computes."""
TIMED = tuple(path for paths in PARTS.values() for path in paths)
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


LATER = ("models",)
"""Parts that start when the first of all, which is the shortest of the watching ones, has ended."""


def selections() -> dict[str, list[str]]:
    """The pytest arguments that select each part, the one that is shown first."""
    found = {
        name: [*(f"tests/{path}" for path in paths), *(f"--ignore=tests/{path}" for path in PURE)]
        for name, paths in PARTS.items()
    }
    rest = [f"--ignore=tests/{path}" for path in TIMED if path != "serving"]
    beside = (path for path in sorted((ROOT / "tests/serving").glob("test_*.py")))
    rest += [f"--ignore={path.relative_to(ROOT)}" for path in beside if f"serving/{path.name}" not in PURE]
    return {**found, "computing": ["tests", *rest, "--ignore=tests/models"], "models": ["tests/models"]}


def main(arguments: list[str]) -> int:
    """Runs all parts; returns the exit status."""
    signal.signal(signal.SIGTERM, interrupt)
    running: dict[str, subprocess.Popen[bytes]] = {}
    commands = {name: command(name, *selected, *arguments) for name, selected in selections().items()}
    with contextlib.ExitStack() as stack:
        outputs = {name: stack.enter_context(tempfile.TemporaryFile()) for name in commands}
        shown = next(iter(outputs))

        def start(name: str) -> None:
            said = None if name == shown else outputs[name]
            stderr = subprocess.STDOUT if said else None
            running[name] = subprocess.Popen(
                commands[name], cwd=ROOT, stdout=said, stderr=stderr, start_new_session=True
            )
            if name not in PARTS:
                give_way(running[name].pid)

        try:
            for name in commands:
                if name not in LATER:
                    start(name)
            running[shown].wait()
            for name in LATER:
                start(name)
            codes = [part.wait() for part in running.values()]
        except KeyboardInterrupt:
            return 130
        finally:
            for part in running.values():
                end(part)
            for name, said in outputs.items():
                if name != shown:
                    print(f"the part {name}:", flush=True)
                    said.seek(0)
                    sys.stdout.buffer.write(said.read())
                    sys.stdout.flush()
    return 0 if passed(codes) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

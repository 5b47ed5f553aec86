"""Runs the tests in concurrent parts: those that watch real processes by the clock, and at low priority what computes.

`python scripts/run_tests.py [--quick] [PYTEST ARGUMENTS]`, called by `make test` and `make quick`. The watching parts mostly wait,
so they share a machine; what computes, the type checker and the CUDA compiler among them, runs behind them at nice 10, two at a
time. The output of the first part is shown as it comes, that of the others at the end. Exits with 1 when any fails; a part in
which nothing is selected passes if another selects something. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
WATCHING: dict[str, tuple[str, ...]] = {
    "deployments": ("chaos", "e2e"),
    "processes": ("procs", "replay"),
    "serving": ("serving", "workers/test_collectives.py", "workers/test_torch_dist.py"),
}
"""Paths under tests/ that measure times, or stop and kill processes, by part."""
PURE = tuple(
    f"serving/test_{name}.py"
    for name in ("deltas", "detokenizer", "json_bounds", "processor", "tokens", "tokens_spm", "wire_openai")
)
"""Of these paths, what only computes."""
TIMED = tuple(path for paths in WATCHING.values() for path in paths)
QUICK = ("-n", "2", "tests/arch", "tests/unit", "tests/e2e/test_start.py")
CHECKS: dict[str, tuple[str, ...]] = {"types": ("-m", "mypy"), "cuda": ("setup.py", "-q", "cuda_compile", "--check")}
"""Commands of Python that are no tests."""
QUICK_CHECKS = ("types",)
COMPUTING_AT_ONCE = 2
NICENESS = 10  # what computes gets a tenth of the default share, so that no timed test starves on a busy machine
NOTHING_SELECTED = 5  # pytest's exit code
LOOK_S = 0.1


def pytest_command(name: str, *arguments: str) -> list[str]:
    """The pytest command of one part; parts share no cache directory."""
    cache = f"cache_dir=.pytest_cache/{name}"
    return [sys.executable, "-m", "pytest", "-m", "not slow", "-o", cache, *arguments]


def selections() -> dict[str, list[str]]:
    """The pytest arguments that select each part of the whole suite, in the order of their starts."""
    watching = {
        name: [*(f"tests/{path}" for path in paths), *(f"--ignore=tests/{path}" for path in PURE)]
        for name, paths in WATCHING.items()
    }
    rest = [f"--ignore=tests/{path}" for path in TIMED if path != "serving"]
    beside = (path for path in sorted((ROOT / "tests/serving").glob("test_*.py")))
    rest += [f"--ignore={path.relative_to(ROOT)}" for path in beside if f"serving/{path.name}" not in PURE]
    return {**watching, "computing": ["tests", *rest, "--ignore=tests/models"], "models": ["tests/models"]}


def commands(arguments: list[str]) -> dict[str, list[str]]:
    """All that is run, by name, in the order of their starts; the first one's output is shown as it comes."""
    if is_quick := "--quick" in arguments:
        arguments = [word for word in arguments if word != "--quick"]
    parts = {"quick": list(QUICK)} if is_quick else selections()
    tests = {name: pytest_command(name, *selected, *arguments) for name, selected in parts.items()}
    checks = QUICK_CHECKS if is_quick else CHECKS
    return {**tests, **{name: [sys.executable, *CHECKS[name]] for name in checks}}


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


def passed(tests: list[int], checks: list[int]) -> bool:
    """True if nothing failed and at least one part of the tests had something to run."""
    return set(tests) <= {0, NOTHING_SELECTED} and 0 in tests and not any(checks)


def run(parts: dict[str, list[str]]) -> dict[str, int]:
    """Runs all commands; returns their exit statuses. Prints their outputs, also when interrupted."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    waiting = deque(parts)
    with contextlib.ExitStack() as stack:
        outputs = {name: stack.enter_context(tempfile.TemporaryFile()) for name in list(parts)[1:]}

        def start(name: str) -> None:
            said = outputs.get(name)
            stderr = subprocess.STDOUT if said else None
            running[name] = subprocess.Popen(parts[name], cwd=ROOT, stdout=said, stderr=stderr, start_new_session=True)
            if name not in WATCHING:
                give_way(running[name].pid)

        def num_computing() -> int:
            return sum(part.poll() is None for name, part in running.items() if name not in WATCHING)

        try:
            while waiting or any(part.poll() is None for part in running.values()):
                while waiting and (waiting[0] in WATCHING or num_computing() < COMPUTING_AT_ONCE):
                    start(waiting.popleft())
                time.sleep(LOOK_S)
        finally:
            for part in running.values():
                end(part)
            for name, said in outputs.items():
                print(f"the part {name}:", flush=True)
                said.seek(0)
                sys.stdout.buffer.write(said.read())
                sys.stdout.flush()
    return {name: part.returncode for name, part in running.items()}


def main(arguments: list[str]) -> int:
    """Runs all parts; returns the exit status."""
    signal.signal(signal.SIGTERM, interrupt)
    try:
        codes = run(commands(arguments))
    except KeyboardInterrupt:
        return 130
    tests = [code for name, code in codes.items() if name not in CHECKS]
    return 0 if passed(tests, [codes[name] for name in CHECKS if name in codes]) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

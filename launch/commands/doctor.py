"""`trireme doctor`: checks what this machine and installation support, and how to fix the rest.

Inspects and never changes anything. torch and the native extension are tried in a process of their own: a launcher never imports
tensors.
"""

from __future__ import annotations

import json
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from typing import Literal, NamedTuple

from trireme import __version__
from trireme.errors import ModelError
from trireme.launch.options import Invocation
from trireme.machine.device import DeviceFacts, read_device
from trireme.model.files import PACKAGED, find_model
from trireme.sizes import GIB, MIB, format_bytes

LIBRARIES = ("torch", "msgspec", "pyzmq", "numpy", "starlette", "uvicorn", "tokenizers", "jinja2", "safetensors")
MIN_FILES = 4096
PROBE_S = 120
_PROBE = """
import json, torch
from trireme.models.native import load_native
print(json.dumps({"torch": torch.__version__, "cuda": torch.cuda.is_available(), "isa": load_native().isa()}))
"""


class Finding(NamedTuple):
    """One check. `cure` is what to type when it is not ok."""

    what: str
    state: Literal["ok", "warn", "fail"]
    found: str
    cure: str = ""


def run(invocation: Invocation) -> int:
    """Prints the findings; exit status 1 when one of them stops Trireme from working."""
    findings = examine(read_device())
    if invocation.options["json"]:
        print(json.dumps([finding._asdict() for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{finding.state:<5} {finding.what:<18} {finding.found}")
            if finding.cure:
                print(f"{'':<24} try   {finding.cure}")
    return 1 if any(finding.state == "fail" for finding in findings) else 0


def examine(device: DeviceFacts) -> list[Finding]:
    """All findings about this machine, its libraries, the native extension and the installed models."""
    return [
        Finding("trireme", "ok", f"{__version__} on Python {platform.python_version()}, {platform.platform()}"),
        *_machine(device),
        *_libraries(),
        *_native(),
        *_models(),
    ]


def _machine(device: DeviceFacts) -> list[Finding]:
    isa = " ".join(device.isa) or "no vector extension that has a kernel"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shm = _free_in("/dev/shm")
    return [
        Finding("processor", "ok", f"{device.cores} cores, {device.cpu}"),
        Finding("instruction sets", "ok" if "avx2" in device.isa else "warn", isa),
        Finding(
            "memory",
            "ok" if device.memory_free > GIB else "warn",
            f"{format_bytes(device.memory_free)} free of {format_bytes(device.memory_total)}",
        ),
        _gpus(device),
        Finding(
            "open files",
            "ok" if files >= MIN_FILES else "warn",
            f"limit {files}",
            "" if files >= MIN_FILES else f"ulimit -n {MIN_FILES}",
        ),
        Finding(
            "/dev/shm",
            "ok" if shm > 64 * MIB else "warn",
            f"{format_bytes(shm)} free",
            "" if shm > 64 * MIB else "docker run --shm-size 1g, or mount -o remount,size=1g /dev/shm",
        ),
    ]


def _free_in(directory: str) -> int:
    """Free bytes; 0 where there is no such directory."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return 0


def _gpus(device: DeviceFacts) -> Finding:
    if not device.num_gpus:
        return Finding("GPUs", "ok", "none: models run on the processor")
    if not device.has_cuda_kernels:
        why = f"{device.num_gpus}, and no kernels for them: models run on the processor"
        return Finding("GPUs", "warn", why, "make native, with nvcc and a torch for CUDA")
    return Finding("GPUs", "ok", str(device.num_gpus))


def _libraries() -> list[Finding]:
    found, missing = [], []
    for name in LIBRARIES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    findings = [Finding("libraries", "ok", ", ".join(found))]
    if missing:
        findings.append(Finding("libraries", "fail", "missing: " + ", ".join(missing), "make setup"))
    return findings


def _native() -> list[Finding]:
    """Loads torch and the extension as a worker would."""
    try:
        probe = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, errors="replace", timeout=PROBE_S
        )
    except subprocess.TimeoutExpired:
        return [Finding("native extension", "fail", f"torch and it did not load within {PROBE_S} s", "make native")]
    if probe.returncode:
        cause = (probe.stderr.strip().splitlines() or ["no output"])[-1]
        return [Finding("native extension", "fail", cause, "make native")]
    facts = json.loads(probe.stdout.strip().splitlines()[-1])  # (a library may have printed something before)
    return [
        Finding("native extension", "ok", f"kernels for {facts['isa']}"),
        Finding("torch", "ok", f"{facts['torch']}, {'with' if facts['cuda'] else 'without'} CUDA"),
    ]


def _models() -> list[Finding]:
    findings = []
    for name in PACKAGED:
        try:
            files = find_model(name)
            findings.append(Finding(f"model {name}", "ok", format_bytes(files.path.stat().st_size)))
        except ModelError as error:
            findings.append(Finding(f"model {name}", "warn", "not installed", error.hint))
    return findings

"""Hardware facts of this machine: cores, memory, instruction sets, GPUs. Read once by the launcher, before anything starts.

Reads only /proc, /sys and /dev, so it is quick and torch-free. Respects container limits (trireme/machine/cgroups.py).
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import msgspec

from trireme.machine.cgroups import GroupLimits, read_limits, usable_cores

_ISA_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
)


class DeviceFacts(msgspec.Struct, frozen=True):
    """`cores` is what this process may use; memory in bytes; `isa` are /proc/cpuinfo's names. `memory_held` is what this process
    and its children already hold: parts of a deployment are prespawned while the launcher still computes its budget."""

    cores: int
    memory_free: int
    memory_total: int
    cpu: str = ""
    isa: tuple[str, ...] = ()
    num_gpus: int = 0
    memory_held: int = 0
    has_cuda_kernels: bool = False  # the extension models._cuda is built


class GpuFacts(msgspec.Struct, frozen=True):
    """One NVIDIA GPU; memory in bytes."""

    name: str
    memory_free: int
    memory_total: int


def read_gpu() -> GpuFacts | None:
    """The first GPU, as nvidia-smi reports it (which takes a second on some machines); None without one."""
    fields = "--query-gpu=name,memory.free,memory.total"
    try:
        command = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return gpu_from_text(found.stdout) if found.returncode == 0 else None


def gpu_from_text(text: str) -> GpuFacts | None:
    """Parses the first line of the tool's table: `name, free, total`, in MiB."""
    words = [word.strip() for word in text.strip().split("\n")[0].rsplit(",", 2)]
    if len(words) != 3 or not (words[1].isdecimal() and words[2].isdecimal()):
        return None
    return GpuFacts(words[0], int(words[1]) << 20, int(words[2]) << 20)


def read_device(root: Path = Path("/")) -> DeviceFacts:
    """Facts of this machine; tests pass another `root`."""
    name, flags = _cpu(root)
    limits = read_limits(root)
    free, total = _memory(root, limits)
    return DeviceFacts(
        cores=usable_cores(len(os.sched_getaffinity(0)), limits),
        memory_free=free,
        memory_total=total,
        cpu=name,
        isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
        memory_held=_held(root),
        num_gpus=len(list((root / "dev").glob("nvidia[0-9]*"))),
        has_cuda_kernels=importlib.util.find_spec("trireme.models._cuda") is not None,
    )


def _memory(root: Path, limits: GroupLimits) -> tuple[int, int]:
    """(free, total) of the machine, or of the container where that is less."""
    rows = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (int(rows.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    free = free if limits.memory_free is None else min(free, limits.memory_free)
    return free, total if limits.memory is None else min(total, limits.memory)


def _held(root: Path) -> int:
    """Bytes of this process and its children, without file-backed pages."""
    children = (pid for task in (root / "proc/self/task").glob("*/children") for pid in _read(task).split())
    held = 0
    for process in ("self", *children):
        for line in _read(root / "proc" / process / "status").splitlines():
            key, _, value = line.partition(":")
            if key in ("RssAnon", "RssShmem"):
                held += int(value.split()[0]) * 1024
    return held


def _cpu(root: Path) -> tuple[str, set[str]]:
    name, flags = platform.machine(), set[str]()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        if key.strip() == "flags":
            return name, set(value.split())
    return name, flags


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

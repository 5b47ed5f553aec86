"""What this machine offers: cores, memory, instruction sets, GPUs. Read once by the launcher, before anything starts.

Looks only at /proc, /sys and /dev, so that it is quick and torch-free. Respects the limits of a container.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path

import msgspec

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
    """`cores` is what this process may use; memory in bytes; `isa` are /proc/cpuinfo's names."""

    cores: int
    memory_free: int
    memory_total: int
    cpu: str = ""
    isa: tuple[str, ...] = ()
    num_gpus: int = 0
    has_cuda_kernels: bool = False  # the extension models._cuda is built


class GpuFacts(msgspec.Struct, frozen=True):
    """One NVIDIA card; memory in bytes."""

    name: str
    memory_free: int
    memory_total: int


def read_gpu() -> GpuFacts | None:
    """The first card, as the driver's own tool tells (it takes a second on some machines); None without one."""
    fields = "--query-gpu=name,memory.free,memory.total"
    try:
        command = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return gpu_from_text(found.stdout) if found.returncode == 0 else None


def gpu_from_text(text: str) -> GpuFacts | None:
    """The first line of the tool's table: `name, free, total`, in MiB."""
    words = [word.strip() for word in text.strip().split("\n")[0].rsplit(",", 2)]
    if len(words) != 3 or not (words[1].isdecimal() and words[2].isdecimal()):
        return None
    return GpuFacts(words[0], int(words[1]) << 20, int(words[2]) << 20)


def read_device(root: Path = Path("/")) -> DeviceFacts:
    """Facts of this machine; `root` lets a test put another one in its place."""
    name, flags = _cpu(root)
    free, total = _memory(root)
    return DeviceFacts(
        cores=_cores(root),
        memory_free=free,
        memory_total=total,
        cpu=name,
        isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
        num_gpus=len(list((root / "dev").glob("nvidia[0-9]*"))),
        has_cuda_kernels=importlib.util.find_spec("trireme.models._cuda") is not None,
    )


def _cores(root: Path) -> int:
    """Cores of our affinity mask, less when the container has a smaller share of processor time."""
    cores = len(os.sched_getaffinity(0))
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, round(int(quota[0]) / int(quota[1]))))
    return cores


def _memory(root: Path) -> tuple[int, int]:
    """(free, total): of the machine, or of the container when its limit is lower."""
    rows = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    total, free = (int(rows.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit = _read(root / "sys/fs/cgroup/memory.max").strip()
    if limit.isdigit() and int(limit) < total:
        used = _read(root / "sys/fs/cgroup/memory.current").strip()
        cached = dict(line.split() for line in _read(root / "sys/fs/cgroup/memory.stat").splitlines())
        held = int(used or 0) - int(cached.get("inactive_file", 0))
        total, free = int(limit), min(free, max(0, int(limit) - held))
    return free, total


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

"""Peak rates of this machine (int8 and float32 multiply-adds, memory reads): `python -m trireme.models.cpu.bench.ceilings`.

The loops are in csrc/bench/ceilings.c, compiled here with the C compiler for the local machine. Each figure is the best of
several rounds, since a ceiling is what the machine reaches undisturbed. scripts/roofline.py compares steps with them.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trireme.errors import ConfigError

SOURCE = Path(__file__).resolve().parents[3] / "csrc" / "bench" / "ceilings.c"
FLAGS = ("-O2", "-march=native", "-shared", "-fPIC")
ROUNDS, SECONDS = 7, 0.08
ARRAY_BYTES = 512 << 20


class Ceilings(NamedTuple):
    """Best combined rates of `threads` threads, in 1e9 per second; 0 if the instructions do not exist.

    `int8_gop_s` accumulates as narrowly as the instructions allow (16 bits on AVX2), so no exact kernel reaches it;
    `int8_exact_gop_s` accumulates in 32 bits after every multiply. Two operations per multiply-add.
    """

    isa: str
    threads: int
    read_gb_s: float
    int8_gop_s: float
    int8_exact_gop_s: float
    fma_gflop_s: float


def build_loops() -> ctypes.CDLL:
    """Compiles and loads the loops. Raises ConfigError without a C compiler or the source tree."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not SOURCE.exists():
        raise ConfigError(
            f"ceilings need a C compiler ({compiler or 'none found'}) and {SOURCE.name} of the source tree",
            hint="run it in a clone of the repository",
        )
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ceilings.so"
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(library)], capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"{SOURCE.name} did not compile: {done.stderr.strip()[-400:]}")
        loops = ctypes.CDLL(str(library))
    loops.ceiling_isa.restype = ctypes.c_char_p
    for name in ("ceiling_int8", "ceiling_int8_narrow", "ceiling_fma"):
        getattr(loops, name).argtypes, getattr(loops, name).restype = [ctypes.c_int64], ctypes.c_int64
    loops.ceiling_read.argtypes, loops.ceiling_read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return loops


def rate(work: Callable[[int], int], threads: int) -> float:
    """Rate of `work(thread)` in 1e9 per second on all threads at once, each pinned to its own core."""
    cores = sorted(os.sched_getaffinity(0))
    done = [0] * threads
    spans = [(0.0, 0.0)] * threads
    gate = threading.Barrier(threads)

    def run(index: int) -> None:
        os.sched_setaffinity(0, {cores[index % len(cores)]})
        gate.wait()
        begun = time.perf_counter()
        done[index] = work(index)
        spans[index] = (begun, time.perf_counter())

    workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (max(end for _, end in spans) - min(begun for begun, _ in spans)) / 1e9


def best_rate(loop: Callable[[int], int], threads: int) -> float:
    """Best rate of a multiply-add loop over ROUNDS rounds of about SECONDS each."""
    if loop(1) == 0:
        return 0.0
    begun = time.perf_counter()
    loop(1 << 20)
    rounds = int((1 << 20) * SECONDS / (time.perf_counter() - begun)) + 1
    return max(rate(lambda _: loop(rounds), threads) for _ in range(ROUNDS))


def measure_ceilings(threads: int, array_bytes: int = ARRAY_BYTES) -> Ceilings:
    """Measures all rates: about three seconds and `array_bytes` of memory, which must far exceed the caches."""
    loops = build_loops()
    data = np.ones(array_bytes, np.uint8)
    part = array_bytes // threads
    read = max(
        rate(lambda index: int(loops.ceiling_read(data.ctypes.data + index * part, part)), threads)
        for _ in range(ROUNDS)
    )
    return Ceilings(
        isa=loops.ceiling_isa().decode(),
        threads=threads,
        read_gb_s=read,
        int8_gop_s=best_rate(loops.ceiling_int8_narrow, threads),
        int8_exact_gop_s=best_rate(loops.ceiling_int8, threads),
        fma_gflop_s=best_rate(loops.ceiling_fma, threads),
    )


def main() -> None:
    """Prints the rates for one thread and for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    for threads in parser.parse_args().threads:
        found = measure_ceilings(threads)
        print(
            f"{found.isa}, {threads} thread(s): read {found.read_gb_s:.1f} GB/s, int8 {found.int8_gop_s:.0f} GOP/s "
            f"({found.int8_exact_gop_s:.0f} with sums of 32 bits), float32 {found.fma_gflop_s:.0f} GFLOP/s",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Runs seeds of the simulation: `python -m tests.sim.run --seed N` with a trace, `--count N --processes P` for many.

Seeds that failed are printed with what they broke, and the kept ones run first; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, islice
from pathlib import Path

from tests.sim.world import Result, run_seed
from trireme.coordinator.simulation.trace import Trace

BATCH = 50
KEPT = Path(__file__).with_name("failed_seeds.txt")


def kept_seeds() -> list[int]:
    """Seeds that once broke a promise."""
    lines = (line.split("#")[0].split() for line in KEPT.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def run_batch(first: int, count: int) -> list[Result]:
    return [run_seed(seed) for seed in range(first, first + count)]


def spare_processes(num_sharing: int = 1) -> int:
    """Of one of so many that share the processors."""
    return max(1, len(os.sched_getaffinity(0)) // num_sharing)


@contextlib.contextmanager
def pool_of(processes: int) -> Iterator[ProcessPoolExecutor | None]:
    """None: everything runs here. The processes are new ones: a fork would take locks along that other threads hold."""
    if processes <= 1:
        yield None
        return
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, fresh, logging.disable, (logging.CRITICAL,)) as pool:
        yield pool


def run_many(first: int, count: int, processes: int, pool: ProcessPoolExecutor | None) -> Iterator[Result]:
    """Seeds first, first + 1, ... in their order."""
    batches = [(at, min(BATCH, first + count - at)) for at in range(first, first + count, BATCH)]
    if pool is None:
        for at, size in batches:
            yield from run_batch(at, size)
        return
    remaining = iter(batches)
    waiting = [pool.submit(run_batch, *batch) for batch in islice(remaining, 2 * processes)]
    while waiting:
        yield from waiting.pop(0).result()
        waiting += [pool.submit(run_batch, *batch) for batch in islice(remaining, 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and print its trace")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.seed is not None:
        trace = Trace()
        result = run_seed(args.seed, trace=trace)
        print(*trace.lines, sep="\n")
        print(
            f"seed {result.seed}: {result.breach or 'no breach'}  {dict(result.outcomes)}  digest {result.digest:08x}"
        )
        return bool(result.breach)
    began, failed, outcomes, num_events, virtual_s = time.perf_counter(), 0, Counter[str](), 0, 0.0
    with pool_of(args.processes) as pool:
        for result in chain(map(run_seed, kept_seeds()), run_many(args.first, args.count, args.processes, pool)):
            outcomes += result.outcomes
            num_events += result.num_events
            virtual_s += result.virtual_s
            if result.breach:
                failed += 1
                print(f"seed {result.seed}: {result.breach}", flush=True)
    took = time.perf_counter() - began
    print(
        f"{args.count} seeds in {took:.1f} s ({args.count / took:.1f} per second), {failed} with a breach; "
        f"{dict(outcomes)}; {num_events} events, {virtual_s:.0f} virtual seconds"
    )
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())

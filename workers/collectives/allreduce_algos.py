"""All-reduce algorithm by message size: pushed, one-shot or two-shot over peer memory, or NCCL. Pure.

The times come from workers.collectives.cuda, measured once at the start; all ranks choose from the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

TRIED = tuple(1 << shift for shift in range(13, 27))  # bytes: 8 KiB to 64 MiB
PUSHED_BYTES = 512 << 10  # payload of a pushed message, at most
STAGED_BYTES = 8 << 20  # size of a staging buffer, at least


class AllReduceAlgo(IntEnum):
    """The first three are numbered as in models._cuda.Peers."""

    PUSHED = 0
    ONE_SHOT = 1
    TWO_SHOT = 2
    NCCL = 3


class AlgoRange(NamedTuple):
    """Messages of up to `most` bytes use this algorithm."""

    most: int
    algo: AllReduceAlgo


def usable(size: int, *, pushed: int, staged: int, has_peers: bool, has_nccl: bool) -> list[AllReduceAlgo]:
    """The algorithms that can reduce `size` bytes in one piece."""
    limits = {AllReduceAlgo.PUSHED: pushed, AllReduceAlgo.ONE_SHOT: staged, AllReduceAlgo.TWO_SHOT: staged}
    algos = [algo for algo, most in limits.items() if has_peers and size <= most and size % 16 == 0]
    return [*algos, AllReduceAlgo.NCCL] if has_nccl else algos


def steps_from(times: Mapping[int, Mapping[AllReduceAlgo, float]]) -> list[AlgoRange]:
    """The fastest algorithm for every size tried, with equal neighbours merged. The last one also applies beyond the last size."""
    steps: list[AlgoRange] = []
    for size in sorted(times):
        algo = min(times[size], key=lambda w: (times[size][w], w))
        if steps and steps[-1].algo == algo:
            steps.pop()
        steps.append(AlgoRange(size, algo))
    return steps


def default_steps(pushed: int, staged: int, *, has_peers: bool, has_nccl: bool) -> list[AlgoRange]:
    """The ranges used without measurements."""
    if not has_peers:
        return [AlgoRange(staged, AllReduceAlgo.NCCL)]
    most = AllReduceAlgo.NCCL if has_nccl else AllReduceAlgo.TWO_SHOT
    return [
        AlgoRange(min(128 << 10, pushed), AllReduceAlgo.PUSHED),
        AlgoRange(min(1 << 20, staged), AllReduceAlgo.ONE_SHOT),
        AlgoRange(staged, most),
    ]


def algo_of(steps: Sequence[AlgoRange], size: int) -> AllReduceAlgo:
    """The algorithm for a message of `size` bytes."""
    return next((step.algo for step in steps if size <= step.most), steps[-1].algo)


def describe(steps: Sequence[AlgoRange]) -> str:
    """`pushed up to 256 KiB, nccl beyond`."""
    named = [step.algo.name.lower().replace("_", "-") for step in steps]
    parts = [f"{name} up to {step.most >> 10} KiB" for name, step in zip(named[:-1], steps[:-1], strict=True)]
    return ", ".join([*parts, f"{named[-1]} {'beyond' if parts else 'always'}"])

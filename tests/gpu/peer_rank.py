"""One rank of the tests of collectives between GPUs: `python -m tests.gpu.peer_rank PROGRAM ARENA WORKER TP PP [SECONDS]`.

Ranks share a card where there are too few. A PROGRAM with `@torch` behind it does without peer memory and NCCL. Prints `ready`,
then one line: what it found, or the CollectiveError it got.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.models.cuda import ops as cuda_ops
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import rendezvous as meeting
from trireme.workers.collectives.allreduce_algos import PUSHED_BYTES, AllReduceAlgo
from trireme.workers.collectives.cuda import CudaGroup
from trireme.workers.collectives.shm import ShmGroup

COUNTS = (8, 24, 4096, 4096 * 3 + 8, 100_000, 262_144, 1 << 21, (1 << 23) + 40)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


class NoPeerMemory:
    HANDLE_BYTES = 64

    def __init__(self, *_: object, **__: object) -> None:
        raise CollectiveError("not wanted")


class Rank:
    def __init__(self, group: CudaGroup, mesh: Mesh) -> None:
        self.group, self.mesh = group, mesh

    def input_of(self, rank: int, count: int, dtype: torch.dtype, seed: int) -> Tensor:
        """What a rank contributes: any rank can tell, so each can check its results."""
        generator = torch.Generator("cuda").manual_seed(1000 * seed + rank)
        return torch.randn(count, generator=generator, device="cuda").to(dtype)

    def sum_of(self, count: int, dtype: torch.dtype, seed: int) -> Tensor:
        """In rank order in float32, rounded once."""
        total = torch.zeros(count, device="cuda")
        for rank in range(self.mesh.tp):
            total += self.input_of(rank, count, dtype, seed).float()
        return total.to(dtype)

    def check_sums(self) -> None:
        for seed, count in enumerate(COUNTS):
            for dtype in TYPES:
                x = self.input_of(self.group.rank, count, dtype, seed)
                algos = [
                    algo
                    for algo in (AllReduceAlgo.PUSHED, AllReduceAlgo.ONE_SHOT, AllReduceAlgo.TWO_SHOT)
                    if fits(algo, x)
                ]
                for algo in algos:
                    got = self.group._reduce(x.clone(), algo)
                    assert torch.equal(got, self.sum_of(count, dtype, seed)), (algo, count, dtype)
                got = self.group.all_reduce(x.clone())
                torch.testing.assert_close(got, self.sum_of(count, dtype, seed))
        odd = self.input_of(self.group.rank, 13, torch.bfloat16, 7)
        torch.testing.assert_close(self.group.all_reduce(odd), self.sum_of(13, torch.bfloat16, 7))
        strided = self.input_of(self.group.rank, 64, torch.float32, 8).view(8, 8)[:, :4]
        torch.testing.assert_close(self.group.all_reduce(strided), self.sum_of(64, torch.float32, 8).view(8, 8)[:, :4])

    def check_columns(self) -> None:
        for rows, sizes in (
            (1, [64, 64]),
            (5, [7, 9]),
            (33, [1000, 24]),
            (3, [160, 160]),
            (0, [8, 8]),
            (2000, [4096, 4104]),
        ):
            sizes = [sizes[rank % 2] for rank in range(self.mesh.tp)]
            parts = [self.input_of(r, rows * n, torch.bfloat16, rows).view(rows, n) for r, n in enumerate(sizes)]
            assert torch.equal(self.group.all_gather(parts[self.group.rank], sizes), torch.cat(parts, 1)), (rows, sizes)

    def check_graphs(self) -> None:
        """Many sums and a concatenation in a graph, replayed with other values and in disorder with calls outside."""
        x = torch.empty(4096, dtype=torch.bfloat16, device="cuda")
        kept: list[Tensor] = []

        def launch() -> None:
            kept.clear()
            for algo in (AllReduceAlgo.PUSHED, AllReduceAlgo.ONE_SHOT, AllReduceAlgo.PUSHED, AllReduceAlgo.TWO_SHOT):
                kept.append(self.group._reduce(x.clone(), algo))
            kept.append(self.group.all_gather(x.view(4, -1), [1024] * self.mesh.tp))

        x.zero_()
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        for seed in range(30):
            x.copy_(self.input_of(self.group.rank, 4096, torch.bfloat16, seed))
            graph.replay()
            want = self.sum_of(4096, torch.bfloat16, seed)
            for got in kept[:-1]:
                assert torch.equal(got, want), seed
            parts = [self.input_of(r, 4096, torch.bfloat16, seed).view(4, -1) for r in range(self.mesh.tp)]
            assert torch.equal(kept[-1], torch.cat(parts, 1))
            if seed % 7 == self.group.rank:
                time.sleep(0.01)
            self.group.all_reduce(torch.ones(8, device="cuda"))

    def check_stages(self) -> None:
        """Hidden states run down the stages, several under way."""
        for seed in range(20):
            shape = (1 + 37 * (seed % 3), 64)
            want = self.input_of(0, shape[0] * 64, torch.bfloat16, seed).view(shape)
            x = want
            if not self.mesh.is_first_stage:
                x = self.group.recv_prev(shape, torch.bfloat16)
                assert torch.equal(x, want), seed
            if not self.mesh.is_last_stage:
                self.group.send_next(x)

    def times(self) -> str:
        """Microseconds of each algorithm by size."""
        from trireme.workers.collectives.timing import time_algo

        found = [f"chosen: {self.group.measure().how}"]
        for shift in range(13, 26, 2):
            x = torch.zeros(1 << shift - 1, dtype=torch.bfloat16, device="cuda")
            algos = [
                algo
                for algo in AllReduceAlgo
                if algo is AllReduceAlgo.NCCL and self.group._nccl is not None or fits(algo, x)
            ]
            parts = [f"{algo.name} {time_algo(lambda a=algo, x=x: self.group._reduce(x, a)):.1f}" for algo in algos]
            found.append(f"{1 << shift >> 10}K {' '.join(parts)}")
        for rows in (1, 32, 256):
            x = torch.zeros(rows, 64128, dtype=torch.bfloat16, device="cuda")
            found.append(f"gather {rows} x 64128: {time_algo(lambda x=x: self.group.all_gather(x, [64128] * 2)):.1f}")
        return "; ".join(found)


def fits(algo: AllReduceAlgo, x: Tensor) -> bool:
    return algo is not AllReduceAlgo.NCCL and (algo is not AllReduceAlgo.PUSHED or x.nbytes <= PUSHED_BYTES)


def run(rank: Rank, program: str) -> str:
    group = rank.group
    match program:
        case "all":
            checks: list[Callable[[], None]] = [rank.check_stages] if rank.mesh.pp > 1 else []
            if rank.mesh.tp > 1:
                checks += [rank.check_sums, rank.check_columns]
                checks += [rank.check_graphs] if group.can_be_captured else []
            for check in checks:
                check()
            torch.cuda.synchronize()
            group.check()
            return "fine"
        case "times":
            return rank.times()
        case "absent" if group.rank == 0:
            time.sleep(120)
        case "absent":
            return rank_alone(group, stuck_s=3.0)
        case "quit" if group.rank == 0:
            time.sleep(1.0)
            group.abort()
            return "gone"
        case "quit":
            return rank_alone(group, stuck_s=60.0)
    raise AssertionError(program)


def rank_alone(group: CudaGroup, stuck_s: float) -> str:
    """A sum that nobody else takes part in."""
    begun = time.monotonic()
    try:
        with group.guard(stuck_s):
            for _ in range(5):
                group.all_reduce(torch.ones(4096, dtype=torch.bfloat16, device="cuda"))
            torch.cuda.synchronize()
        group.check()
    except CollectiveError as error:
        return f"after {time.monotonic() - begun:.1f} s: {error}"
    return "nothing happened"


def main() -> None:
    program, _, only = sys.argv[1].partition("@")
    arena, worker, tp, pp = sys.argv[2:6]
    mesh = Mesh(1, int(pp), int(tp)).at_worker(int(worker))
    num_gpus = torch.cuda.device_count()
    torch.cuda.set_device(mesh.gpu(num_gpus))
    cuda_ops.load()
    host = ShmGroup(arena, mesh, timeout_s=100.0, step_timeout_s=100.0)
    if only:
        num_gpus, meeting.PeerMemory = 1, NoPeerMemory  # type: ignore[misc,assignment]
    group = CudaGroup(mesh, host, num_gpus, gathered_bytes=(40 if program == "times" else 1) << 20)
    print("ready", flush=True)
    try:
        print(run(Rank(group, mesh), program), flush=True)
    except CollectiveError as error:
        print(f"CollectiveError: {error}", flush=True)
    group.close()


if __name__ == "__main__":
    main()

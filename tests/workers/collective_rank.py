"""The ranks of the collectives tests. `python -m tests.workers.collective_rank` imports torch once, then reads jobs from stdin,
one a line: PROGRAM ARENA TP PP TIMEOUT. It forks a process per rank and prints

    pids PID...               once all have started
    rank WORKER TEXT          a digest of all that the rank received, or the CollectiveError it got
    end CODE...               once all have ended, with their exit codes
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trireme.errors import CollectiveError
from trireme.models.forward import Group
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import make_group


class Rank:
    """This rank, its checks and the digest of their results."""

    def __init__(self, group: Group, mesh: Mesh) -> None:
        self.group = group
        self.mesh = mesh
        self.digest = hashlib.sha256()

    def keep(self, x: Tensor) -> None:
        self.digest.update(x.contiguous().view(torch.uint8).numpy().tobytes())

    def input_of(self, rank: int, shape: tuple[int, ...], seed: int) -> Tensor:
        """What rank `rank` contributes: any rank can tell, so each can check its results."""
        generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + self.mesh.pp_rank)
        return torch.randn(shape, generator=generator) * 10.0 ** (rank % 3)

    def sum_in_order(self, shape: tuple[int, ...], seed: int) -> Tensor:
        total = self.input_of(0, shape, seed)
        for rank in range(1, self.mesh.tp):
            total = total + self.input_of(rank, shape, seed)
        return total

    def check_reduce(self) -> None:
        shapes = [(1,), (7,), (3, 5), (1, 576), (16, 576), (200, 1001), (1, 0)]
        for seed, shape in enumerate(shapes):
            got = self.group.all_reduce(self.input_of(self.mesh.tp_rank, shape, seed))
            assert torch.equal(got, self.sum_in_order(shape, seed)), shape
            self.keep(got)
        x = self.input_of(self.mesh.tp_rank, (6, 64), 50).bfloat16()
        self.keep(self.group.all_reduce(x))
        strided = self.input_of(self.mesh.tp_rank, (6, 64), 51)[:, :10]
        assert torch.equal(self.group.all_reduce(strided), self.sum_in_order((6, 64), 51)[:, :10])

    def check_gather(self) -> None:
        for seed, rows in ((60, (1,)), (61, (5,)), (62, (300,)), (63, ())):
            sizes = [7 + 13 * rank for rank in range(self.mesh.tp)]
            parts = [self.input_of(rank, (*rows, size), seed) for rank, size in enumerate(sizes)]
            got = self.group.all_gather(parts[self.mesh.tp_rank], sizes)
            assert torch.equal(got, torch.cat(parts, dim=-1))
            self.keep(got)
        sizes = [0 if rank == 0 else 3 for rank in range(self.mesh.tp)]
        ids = torch.full((4, sizes[self.mesh.tp_rank]), self.mesh.tp_rank, dtype=torch.int64)
        assert self.group.all_gather(ids, sizes).shape == (4, 3 * (self.mesh.tp - 1))

    def check_scatter(self) -> None:
        sizes = [5 + 32 * rank for rank in range(self.mesh.tp)]
        for seed, rows in ((70, 1), (71, 9), (72, 250)):
            shape = (rows, sum(sizes))
            x = self.input_of(self.mesh.tp_rank, shape, seed)
            part = self.group.reduce_scatter(x, sizes)  # type: ignore[attr-defined]
            assert part.shape == (rows, sizes[self.mesh.tp_rank])
            assert torch.equal(self.group.all_gather(part, sizes), self.sum_in_order(shape, seed))

    def check_broadcast(self) -> None:
        for root in range(self.mesh.tp):
            x = self.input_of(self.mesh.tp_rank, (50, 333), 80)
            self.group.broadcast(x, root)  # type: ignore[attr-defined]
            assert torch.equal(x, self.input_of(root, (50, 333), 80))
        self.group.barrier()  # type: ignore[attr-defined]

    def check_jitter(self, rounds: int) -> None:
        """Ranks that come early or late by chance; a slot overwritten too soon would show as a wrong sum."""
        rng = random.Random(self.mesh.worker)
        for seed in range(rounds):
            if rng.random() < 0.2:
                time.sleep(rng.random() * 2e-3)
            got = self.group.all_reduce(self.input_of(self.mesh.tp_rank, (37,), seed))
            assert torch.equal(got, self.sum_in_order((37,), seed))

    def check_stages(self, rounds: int) -> None:
        """Hidden states run down the stages, several under way; sizes from one float to many rings."""
        rng = random.Random(5)
        shapes = [(rng.choice([1, 3, 50, 700]), rng.choice([1, 64, 333])) for _ in range(rounds)]
        for seed, shape in enumerate(shapes):
            x = torch.full(shape, float(seed)) + torch.arange(shape[1])
            if not self.mesh.is_first_stage:
                x = self.group.recv_prev(shape, torch.float32)
                assert torch.equal(x, torch.full(shape, float(seed)) + torch.arange(shape[1]))
            if not self.mesh.is_last_stage:
                self.group.send_next(x)

    def time_all_reduce(self) -> str:
        x = torch.ones(576)
        for _ in range(200):
            self.group.all_reduce(x.fill_(1.0))
        best = 1e9
        for _ in range(10):
            start = time.perf_counter()
            for _ in range(300):
                self.group.all_reduce(x)
            best = min(best, (time.perf_counter() - start) / 300)
        return f"{best * 1e6:.1f} us"


def run(rank: Rank, program: str) -> str:
    match program:
        case "all":
            if rank.mesh.tp > 1:
                rank.check_reduce()
                rank.check_gather()
                rank.check_scatter()
                rank.check_broadcast()
                rank.check_jitter(100)
            if rank.mesh.pp > 1:
                rank.check_stages(20)
            return rank.digest.hexdigest()
        case "time":
            return rank.time_all_reduce()
        case "first-absent" if rank.mesh.worker == 0:
            say(rank.mesh, "absent")
            time.sleep(600)
        case "first-absent" if rank.mesh.tp > 1:
            rank.group.all_reduce(torch.ones(10))
        case "first-absent":
            rank.group.recv_prev((4, 4), torch.float32)
        case "last-absent" if rank.mesh.is_last_stage:
            say(rank.mesh, "absent")
            time.sleep(600)
        case "last-absent":
            for _ in range(100):
                rank.group.send_next(torch.ones(100, 100))
        case "mismatch" if rank.mesh.is_last_stage:
            rank.group.recv_prev((4, 5), torch.float32)
        case "mismatch":
            rank.group.send_next(torch.ones(4, 4))
        case "quit" if rank.mesh.worker == 0:
            rank.group.abort()  # type: ignore[attr-defined]
        case "quit":
            rank.group.all_reduce(torch.ones(10))
    return "done"


def write_line(*words: object) -> None:
    """In one piece: all ranks write to the same pipe."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def say(mesh: Mesh, text: str) -> None:
    write_line("rank", mesh.worker, text)


def run_rank(program: str, arena: str, mesh: Mesh, timeout_s: float) -> None:
    try:
        group = make_group(mesh, arena, timeout_s=timeout_s, step_timeout_s=timeout_s)
        say(mesh, run(Rank(group, mesh), program))
    except CollectiveError as error:
        say(mesh, f"CollectiveError: {error}")


def forked(run: Callable[..., object], *job: Any) -> int:
    """The process that does `run(*job)` and ends: with 1 where that raises, which it prints."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run(*job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        program, arena, tp, pp, timeout = line.split()
        mesh = Mesh(1, int(pp), int(tp))
        places = [mesh.at_worker(worker) for worker in range(mesh.num_workers)]
        pids = [forked(run_rank, program, arena, place, float(timeout)) for place in places]
        write_line("pids", *pids)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        write_line("end", *codes)


if __name__ == "__main__":
    main()

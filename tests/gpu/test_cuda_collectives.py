"""Collectives between GPU ranks that are processes of their own: right sums, graphs, and an error instead of a hang.

Two ranks share a card where there is one only; NCCL, which refuses that, is then tried with a single rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trireme.errors import CollectiveError
from trireme.topology.arena import Arena, create_arena
from trireme.topology.mesh import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(200),
]
ROOT = Path(__file__).resolve().parents[2]
CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0


class Ranks:
    """The processes of one job."""

    def __init__(self, program: str, mesh: Mesh) -> None:
        self.arena: Arena = create_arena(mesh, 64, 256, 512)
        sizes = [str(mesh.tp), str(mesh.pp)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.peer_rank", program, self.arena.path, str(worker), *sizes],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for worker in range(mesh.num_workers)
        ]

    def line(self, worker: int) -> str:
        stdout = self.processes[worker].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def ready(self) -> None:
        for worker in range(len(self.processes)):
            assert self.line(worker) == "ready"

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self.arena.close()


@pytest.fixture
def started() -> Iterator[list[Ranks]]:
    made: list[Ranks] = []
    yield made
    for ranks in made:
        ranks.close()


def start(started: list[Ranks], program: str, mesh: Mesh) -> Ranks:
    started.append(Ranks(program, mesh))
    started[-1].ready()
    return started[-1]


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (1, 2)], ids=["tp2", "tp3", "pp2"])
def test_values_are_right_everywhere(started: list[Ranks], shape: tuple[int, int]) -> None:
    tp, pp = shape
    ranks = start(started, "all", Mesh(1, pp, tp))
    assert [ranks.line(worker) for worker in range(tp * pp)] == ["fine"] * (tp * pp)


def test_a_rank_that_does_not_come_is_noticed(started: list[Ranks]) -> None:
    ranks = start(started, "absent", Mesh(1, 1, 2))
    said = ranks.line(1)
    assert said.startswith("after 3."), said
    assert "does not come" in said, said


def test_a_rank_that_gives_up_fails_the_others_when_it_ends(started: list[Ranks]) -> None:
    """The abort of one rank reaches the others' devices by way of their deadline; a death by way of the engine."""
    ranks = start(started, "quit", Mesh(1, 1, 2))
    assert ranks.line(0) == "gone"
    began = time.monotonic()
    said = ranks.line(1)
    assert "after 1" in said, said
    assert time.monotonic() - began < 15


def test_a_stopped_rank_is_noticed(started: list[Ranks]) -> None:
    ranks = start(started, "absent", Mesh(1, 1, 2))
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    assert "does not come" in ranks.line(1)


@pytest.mark.parametrize("tp", [2, 3])
def test_values_are_right_by_torch_alone(started: list[Ranks], tp: int) -> None:
    ranks = start(started, "all@torch", Mesh(1, 1, tp))
    assert [ranks.line(worker) for worker in range(tp)] == ["fine"] * tp


def test_by_torch_a_stopped_rank_is_noticed(started: list[Ranks]) -> None:
    ranks = start(started, "absent@torch", Mesh(1, 1, 2))
    os.kill(ranks.processes[0].pid, signal.SIGSTOP)
    said = ranks.line(1)
    assert said.startswith("after 3."), said
    assert "does not come" in said, said


def test_by_torch_a_killed_rank_is_noticed_at_once(started: list[Ranks]) -> None:
    ranks = start(started, "quit@torch", Mesh(1, 1, 2))
    ranks.processes[0].kill()
    said = ranks.line(1)
    assert "torch.distributed: " in said, said
    assert said.startswith(("after 0.", "after 1.")), said


def test_nccl_with_one_rank() -> None:
    from trireme.workers.collectives.nccl import NcclComm, load_nccl

    nccl = load_nccl()
    assert nccl.version() > 22000
    comm = NcclComm(nccl, nccl.unique_id(), 0, 1, timeout_s=60)
    x = torch.randn(1000, device="cuda").bfloat16()
    want = x.clone()
    graph = torch.cuda.CUDAGraph()
    comm.all_reduce(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        comm.all_reduce(x)
        gathered = comm.all_gather(x, torch.empty_like(x))
        comm.broadcast(gathered)
        part = comm.reduce_scatter(gathered, torch.empty_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(part, want)
    assert comm.failure() == ""
    with pytest.raises(CollectiveError, match="contiguous"):
        comm.all_reduce(x[::2])
    comm.abort()
    assert comm.failure()
    with pytest.raises(CollectiveError, match="aborted"):
        comm.all_reduce(x)

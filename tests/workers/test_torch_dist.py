"""Sums over GPUs by torch.distributed, the last resort: real processes give one card's tokens, and an error instead of a hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import test_cuda_spread as spread
from tests.models.test_sequence_parallel import between_threads, logits_of, tokens_of
from tests.workers.torch_rank import ARCH
from trireme.errors import CollectiveError
from trireme.topology.arena import Arena, create_arena
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import torch_dist as torch_comm
from trireme.workers.collectives.torch_dist import TorchComm

plain_ops = spread.plain_ops
ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """The process that forks the ranks, and what those of the present job have said."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.workers.torch_rank"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pids: list[int] = []
        self._said: dict[int, list[dict[str, Any]]] = {}
        self._codes: dict[int, int] = {}

    def start(self, program: str, arena: Arena, mesh: Mesh, *, cards: int, split_from: int = 0) -> None:
        assert self._process.stdin is not None
        self.pids, self._codes, self._said = [], {}, {worker: [] for worker in range(mesh.num_workers)}
        self._process.stdin.write(f"{program} {arena.path} {mesh.tp} {mesh.pp} {cards} {split_from}\n")
        self._process.stdin.flush()
        while not self.pids:
            self._read()

    def _read(self) -> None:
        assert self._process.stdout is not None
        assert not self._have_ended(), f"the ranks ended with {self._codes} and had said {self._said}"
        words = json.loads(self._process.stdout.readline())
        if "worker" in words:
            self._said[words.pop("worker")].append(words)
        elif "code" in words:
            self._codes[words["pid"]] = words["code"]
        else:
            self.pids = words["pids"]

    def said(self, worker: int, word: str) -> dict[str, Any]:
        """The next of a rank's lines that has `word`."""
        while True:
            while not self._said[worker]:
                self._read()
            if word in (found := self._said[worker].pop(0)):
                return found

    def _have_ended(self) -> bool:
        return bool(self.pids) and len(self._codes) == len(self.pids)

    def codes(self) -> list[int]:
        """When all have ended."""
        while not self._have_ended():
            self._read()
        return [self._codes[pid] for pid in self.pids]

    def kill(self) -> None:
        for pid in self.pids:
            if pid not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.codes()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@pytest.fixture(scope="module")
def launched() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(launched: Ranks) -> Iterator[Ranks]:
    yield launched
    launched.kill()


@pytest.mark.parametrize(
    ("tp", "pp", "cards", "split_from"),
    [(2, 1, 1, 0), (4, 1, 4, 0), (2, 2, 4, 0), (4, 1, 1, 1)],
    ids=["tp2", "tp4", "tp2pp2", "rows split"],
)
def test_tokens_are_those_of_one_card(ranks: Ranks, tp: int, pp: int, cards: int, split_from: int) -> None:
    """Ranks share a GPU, or have their own and no NCCL; all of the last stage get the same bits."""
    mesh = Mesh(1, pp, tp)
    alone = logits_of(ARCH, (1, 1), 0, between_threads((1, 1)))
    with create_arena(mesh, 64, 256, 512) as arena:
        ranks.start("once", arena, mesh, cards=cards, split_from=split_from)
        for worker in range(mesh.num_workers):
            ready = ranks.said(worker, "ready")
            how, why = ready["ready"]
            assert (how, ready["can_be_captured"]) == ("torch.distributed (gloo)", False)
            assert why.startswith("no peer memory: this machine has no GPU; no NCCL: ")
            assert ("ranks share a GPU" in why) == (cards == 1)
            assert " ms for 8 KiB, " in why
        found = [ranks.said(worker, "tokens") for worker in range(mesh.num_workers)]
        assert found[-1]["tokens"] == tokens_of(alone)
        assert found[-tp:] == [found[-1]] * tp
        assert ranks.codes() == [0] * mesh.num_workers


def start_steps(ranks: Ranks, arena: Arena, mesh: Mesh) -> None:
    ranks.start("forever", arena, mesh, cards=1)
    for worker in range(mesh.num_workers):
        ranks.said(worker, "round")


@pytest.mark.parametrize("tp", [2, 3])
def test_a_killed_rank_ends_the_others_at_once(ranks: Ranks, tp: int) -> None:
    mesh = Mesh(1, 1, tp)
    with create_arena(mesh, 64, 256, 512) as arena:
        start_steps(ranks, arena, mesh)
        os.kill(ranks.pids[0], signal.SIGKILL)
        begun = time.monotonic()
        for worker in range(1, tp):
            assert ranks.said(worker, "error")["error"].startswith("torch.distributed: ")
        assert ranks.codes() == [-signal.SIGKILL, *[0] * (tp - 1)]
        assert time.monotonic() - begun < 5


@pytest.mark.timeout(60)
def test_a_stopped_rank_ends_the_others_in_time(ranks: Ranks) -> None:
    mesh = Mesh(1, 1, 3)
    with create_arena(mesh, 64, 256, 512) as arena:
        start_steps(ranks, arena, mesh)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        begun = time.monotonic()
        errors = [ranks.said(worker, "error")["error"] for worker in (0, 2)]
        assert 10 < time.monotonic() - begun < 15
        # by the watchdog, or by the limit of a call where the watchdog counts less time on a busy machine
        assert any("another rank" in error for error in errors), errors


# ---------------------------------------------------------------- one group of one rank, in this process


def comm_of(tmp_path: Path, **limits: Any) -> TorchComm:
    return TorchComm(str(tmp_path / "meeting"), 0, 1, timeout_s=20.0, **limits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0, 4), (7,), (33, 5), (40, 3, 2)])
def test_messages_pass_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(torch_comm, "PIECE_BYTES", 64)
    comm = comm_of(tmp_path)
    x = torch.randn(shape).to(dtype)
    assert torch.equal(comm.all_reduce(x.clone()), x)
    gathered: Tensor = comm.all_gather(x, x.new_full((1, *shape), float("nan")))
    assert torch.equal(gathered[0], x)


def test_ranks_that_do_not_meet_are_an_error(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(CollectiveError, match=r"torch\.distributed: "):
        TorchComm(str(tmp_path / "meeting"), 0, 2, timeout_s=0.5)
    assert time.monotonic() - begun < 10


class EndsBetween:
    """A work that ends just after a slice of waiting for it: gloo's wait says that the time is over, the next one how it ended."""

    def __init__(self, failure: str) -> None:
        self._failure, self._waits = failure, 0

    def wait(self, _: timedelta) -> bool:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def is_completed(self) -> bool:
        return True


def test_a_sum_that_ends_between_two_looks_is_one(tmp_path: Path) -> None:
    comm = comm_of(tmp_path)
    comm._wait(lambda: EndsBetween(""))
    with pytest.raises(CollectiveError, match=r"^torch\.distributed: a rank died$"):
        comm._wait(lambda: EndsBetween("a rank died"))


def test_an_aborted_group_says_why(tmp_path: Path) -> None:
    comm = comm_of(tmp_path, reason=lambda: "rank 0: a step waits")
    assert comm.failure() == ""
    comm.abort()
    with pytest.raises(CollectiveError, match="rank 0: a step waits"):
        comm.all_reduce(torch.ones(4))


def test_a_torch_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_comm.lacks_torch() == ""
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert torch_comm.lacks_torch() == "torch was built without gloo"

"""Collectives over real processes: right and bit-identical sums, and an error instead of a hang whatever a peer does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from trireme.errors import CollectiveError, ConfigError
from trireme.models.forward import SoloGroup
from trireme.models.native import load_native
from trireme.topology.arena import MAX_WORKERS, Arena, arena_bytes, create_arena
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import make_group

ROOT = Path(__file__).resolve().parents[2]


class Launcher:
    """The process that forks the ranks, and what the ranks of the present job have said."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.workers.collective_rank"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.pids: list[int] = []
        self.said: dict[int, list[str]] = {}
        self.codes: list[int] | None = []

    def start(self, program: str, arena: str, mesh: Mesh, timeout_s: float = 60.0) -> None:
        assert self.process.stdin is not None
        self.pids, self.said, self.codes = [], {worker: [] for worker in range(mesh.num_workers)}, None
        self.process.stdin.write(f"{program} {arena} {mesh.tp} {mesh.pp} {timeout_s}\n")
        self.process.stdin.flush()

    def read(self) -> None:
        assert self.process.stdout is not None
        match self.process.stdout.readline().split(maxsplit=2):
            case ["rank", worker, text]:
                self.said[int(worker)].append(text.strip())
            case ["pids", *rest]:
                self.pids = [int(pid) for pid in " ".join(rest).split()]
            case ["end", *rest]:
                self.codes = [int(code) for code in " ".join(rest).split()]
            case other:
                raise AssertionError(f"the launcher said {other}")

    def wait_for(self, worker: int, text: str) -> None:
        while not self.pids or text not in self.said[worker]:
            self.read()

    def finish(self) -> list[str]:
        """Last words of every rank."""
        while self.codes is None:
            self.read()
        return [self.said[worker][-1] if self.said[worker] else "" for worker in sorted(self.said)]

    def kill_ranks(self) -> None:
        if self.codes is None:
            while not self.pids:
                self.read()
            for pid in self.pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.finish()


@pytest.fixture(scope="module")
def launched() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    os.killpg(launcher.process.pid, signal.SIGKILL)
    launcher.process.communicate()


@pytest.fixture
def ranks(launched: Launcher) -> Iterator[Launcher]:
    yield launched
    launched.kill_ranks()


def run_all(ranks: Launcher, arena: str, mesh: Mesh) -> list[str]:
    ranks.start("all", arena, mesh)
    lines = ranks.finish()
    assert ranks.codes == [0] * mesh.num_workers, lines
    return lines


@pytest.mark.parametrize(("tp", "pp", "max_tokens"), [(2, 1, 256), (4, 1, 256), (4, 1, 1), (2, 2, 1), (1, 3, 16)])
def test_collectives_over_processes(ranks: Launcher, tp: int, pp: int, max_tokens: int) -> None:
    """max_tokens 1 makes slots and rings of one page, so that messages pass in many pieces."""
    mesh = Mesh(1, pp, tp)
    hidden = 576 if max_tokens > 1 else 1
    with create_arena(mesh, max_tokens, hidden, 1) as arena:
        digests = run_all(ranks, arena.path, mesh)
    for stage in range(pp):
        assert len(set(digests[stage * tp : (stage + 1) * tp])) == 1


def test_gloo_gives_the_same_bits(ranks: Launcher, tmp_path: Path) -> None:
    mesh = Mesh(1, 2, 2)
    with create_arena(mesh, 64, 64, 1) as arena:
        over_memory = run_all(ranks, arena.path, mesh)
    assert run_all(ranks, f"file://{tmp_path}/meet", mesh) == over_memory


ABSENT = [
    ("first-absent", Mesh(1, 1, 2), "all_reduce"),
    ("first-absent", Mesh(1, 1, 4), "all_reduce"),
    ("first-absent", Mesh(1, 2, 1), "recv_prev"),
    ("last-absent", Mesh(1, 2, 1), "send_next"),
]


def start_absent(ranks: Launcher, program: str, arena: Arena, mesh: Mesh, timeout_s: float) -> int:
    """Starts ranks of which one never comes to the collective; returns that one, once it idles."""
    ranks.start(program, arena.path, mesh, timeout_s)
    idle = 0 if program == "first-absent" else mesh.num_workers - 1
    ranks.wait_for(idle, "absent")
    return idle


@pytest.mark.parametrize(("program", "mesh", "call"), ABSENT)
def test_a_killed_rank_is_an_error_at_once(ranks: Launcher, program: str, mesh: Mesh, call: str) -> None:
    with create_arena(mesh, 1, 64, 1) as arena:
        idle = start_absent(ranks, program, arena, mesh, timeout_s=100.0)
        time.sleep(0.2)
        os.kill(ranks.pids[idle], signal.SIGKILL)
        start = time.monotonic()
        lines = [line for worker, line in enumerate(ranks.finish()) if worker != idle]
        assert time.monotonic() - start < 5.0
    for line in lines:
        assert line.startswith(f"CollectiveError: {call}: ")
    assert any(line.endswith(f"(pid {ranks.pids[idle]}) died") for line in lines), lines


@pytest.mark.parametrize(("program", "mesh", "call"), ABSENT)
def test_a_rank_that_stays_away_is_an_error_in_time(ranks: Launcher, program: str, mesh: Mesh, call: str) -> None:
    with create_arena(mesh, 1, 64, 1) as arena:
        idle = start_absent(ranks, program, arena, mesh, timeout_s=0.3)
        other = mesh.num_workers - 1 - idle
        while not ranks.said[other]:
            ranks.read()
    line = ranks.said[other][0]
    assert line.startswith(f"CollectiveError: {call}: ")
    assert line.endswith(("did not come in time", "aborted by worker 1", "aborted by worker 2"))


@pytest.mark.parametrize(("program", "mesh", "call"), ABSENT)
def test_the_owner_can_abort(ranks: Launcher, program: str, mesh: Mesh, call: str) -> None:
    with create_arena(mesh, 1, 64, 1) as arena:
        idle = start_absent(ranks, program, arena, mesh, timeout_s=100.0)
        arena.abort()
        other = mesh.num_workers - 1 - idle
        while not ranks.said[other]:
            ranks.read()
    assert ranks.said[other] == [f"CollectiveError: {call}: aborted by the engine core"]


def test_a_rank_can_abort_the_others(ranks: Launcher) -> None:
    mesh = Mesh(1, 1, 2)
    with create_arena(mesh, 1, 64, 1) as arena:
        ranks.start("quit", arena.path, mesh)
        assert ranks.finish() == ["done", "CollectiveError: all_reduce: aborted by worker 0"]


def test_stages_that_disagree_on_the_shape(ranks: Launcher) -> None:
    mesh = Mesh(1, 2, 1)
    with create_arena(mesh, 1, 64, 1) as arena:
        ranks.start("mismatch", arena.path, mesh)
        want = "CollectiveError: recv_prev: 80 bytes expected, the previous stage sent 64"
        assert ranks.finish() == ["done", want]


# ---------------------------------------------------------------- the arena and its edges, in this process


def test_arena_size_is_that_of_its_parts() -> None:
    assert arena_bytes(Mesh(1, 1, 1), 2048, 576, 49152) < 16384
    two = arena_bytes(Mesh(1, 1, 2), 2048, 576, 49152)
    assert 4 << 20 <= two <= (4 << 20) + 16384
    assert arena_bytes(Mesh(1, 2, 2), 2048, 576, 49152) > 2 * two
    with pytest.raises(ConfigError, match="share one arena"):
        arena_bytes(Mesh(1, 64, 64), 1, 1, 1)
    assert MAX_WORKERS >= 512


def test_an_arena_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    mesh = Mesh(1, 1, 2)
    with pytest.raises(CollectiveError, match="cannot open the arena"):
        make_group(mesh, str(tmp_path / "none"))
    junk = tmp_path / "junk"
    junk.write_bytes(b"")
    with pytest.raises(CollectiveError, match="cannot map the arena"):
        make_group(mesh, str(junk))
    junk.write_bytes(bytes(1 << 16))
    with pytest.raises(CollectiveError, match="not made for this program"):
        make_group(mesh, str(junk))
    with create_arena(mesh, 1, 1, 1) as arena, pytest.raises(CollectiveError, match="this place in the mesh"):
        make_group(Mesh(1, 1, 4, tp_rank=3), arena.path)


def test_make_group_without_others_or_without_an_arena() -> None:
    assert isinstance(make_group(Mesh(1, 1, 1), ""), SoloGroup)
    with pytest.raises(ConfigError, match="no arena"):
        make_group(Mesh(1, 1, 2), "")


def test_the_ends_of_a_pipeline_have_no_neighbour() -> None:
    mesh = Mesh(1, 2, 1)
    with create_arena(mesh, 1, 1, 1) as arena:
        comm = load_native().Comm(arena.path, 0, 0, 1.0, 1.0)
        with pytest.raises(RuntimeError, match="first stage"):
            comm.recv_prev(np.empty(2, np.float32))


def test_a_tensor_of_another_width_is_named() -> None:
    mesh = Mesh(1, 1, 2)
    with create_arena(mesh, 1, 1, 1) as arena:
        group = make_group(mesh, arena.path)
        with pytest.raises(CollectiveError, match="all_gather: x is float32 .3, 3.* of 2 columns"):
            group.all_gather(torch.zeros(3, 3), [2, 4])
        with pytest.raises(CollectiveError, match="reduce_scatter: x is float32 .3, 3.* of 6 columns"):
            group.reduce_scatter(torch.zeros(3, 3), [2, 4])


def test_arena_close_twice_and_after_workers_mapped_it() -> None:
    mesh = Mesh(1, 1, 2)
    arena = create_arena(mesh, 1, 1, 1)
    comm = load_native().Comm(arena.path, 0, 0, 0.05, 0.05)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="did not come in time"):
        comm.all_reduce(np.array([1, 2, 3, 4], np.float32))

"""The ranks of the tests of sums by torch.distributed: the GPU's model body on the CPU, over the group that GPUs have when there is
neither peer memory nor NCCL.

`python -m tests.workers.torch_rank` imports torch once, then reads jobs, one a line: PROGRAM ARENA TP PP CARDS SPLIT_FROM. It forks
a process per rank, writes their pids, and each rank a line for all that happens, as JSON.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
from typing import Any

import pytest
import torch

from tests.models.test_cuda_spread import BLOCK, OnCpu, make_plain, stored
from tests.models.test_sequence_parallel import FIT, MAX_LEN, PLAN, batch_of
from tests.models.test_shards import arch_of
from tests.workers.collective_rank import forked
from trireme.errors import CollectiveError
from trireme.models.cuda.decoder import CudaModel
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.mesh import Mesh
from trireme.workers.collectives import rendezvous as rendezvous
from trireme.workers.collectives.cuda import CudaGroup
from trireme.workers.collectives.shm import ShmGroup

ARCH = arch_of(**FIT, tie_embeddings=False)


class NoPeerMemory:
    HANDLE_BYTES = 64

    def __init__(self, *_: Any, **__: Any) -> None:
        raise CollectiveError("this machine has no GPU")


def say(**words: Any) -> None:
    """In one piece: all ranks write to the same pipe."""
    os.write(1, (json.dumps(words) + "\n").encode())


def run(program: str, arena: str, mesh: Mesh, cards: int, split_from: int) -> None:
    """`once` or `forever` through the steps of PLAN, each bounded as workers.cuda.worker bounds it."""
    worker = mesh.worker
    with pytest.MonkeyPatch.context() as patch, OnCpu(), torch.inference_mode():
        make_plain(patch)
        patch.setattr(rendezvous, "PeerMemory", NoPeerMemory)
        group = CudaGroup(mesh, ShmGroup(arena, mesh, timeout_s=100.0, step_timeout_s=100.0), cards)
        chosen = group.measure()
        model = CudaModel(
            ARCH,
            stored(ARCH)(RankSpans(ARCH, mesh)),
            torch.float32,
            max_len=MAX_LEN,
            progress=lambda *_: None,
            place=(mesh, group),
            split_from=split_from,
        )
        kv = model.allocate_kv(6 * MAX_LEN // BLOCK, BLOCK)
        say(worker=worker, ready=chosen, can_be_captured=group.can_be_captured)
        digest, tokens = hashlib.sha256(), list[int]()
        try:
            for _ in range(1) if program == "once" else itertools.count():
                for chunks in PLAN:
                    with group.watch.guard():
                        logits = model.run(batch_of(chunks), kv)
                    group.check()
                    digest.update(logits.numpy().tobytes())
                    tokens += logits.argmax(-1).tolist() if mesh.is_last_stage else []
                if program == "forever":
                    tokens.clear()
                    say(worker=worker, round="done")
            say(worker=worker, tokens=tokens, digest=digest.hexdigest())
        except CollectiveError as error:
            group.abort()
            say(worker=worker, error=str(error))
    group.close()


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        program, arena, *numbers = line.split()
        tp, pp, cards, split_from = map(int, numbers)
        mesh = Mesh(1, pp, tp)
        places = [mesh.at_worker(worker) for worker in range(mesh.num_workers)]
        pids = [forked(run, program, arena, place, cards, split_from) for place in places]
        say(pids=pids)
        for pid in pids:
            say(code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), pid=pid)


if __name__ == "__main__":
    main()

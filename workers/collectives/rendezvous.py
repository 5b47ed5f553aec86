"""Rendezvous of an engine's ranks: sets up peer memory, NCCL, and torch.distributed where a stage has neither.

Used once by workers.collectives.cuda, over the engine's arena. A transport that one rank lacks is used by no rank of its stage.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from trireme.errors import CollectiveError
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.allreduce_algos import PUSHED_BYTES
from trireme.workers.collectives.nccl import ID_BYTES, Nccl, NcclComm, load_nccl
from trireme.workers.collectives.peer import PeerMemory
from trireme.workers.collectives.shm import ShmGroup
from trireme.workers.collectives.torch_dist import TorchComm, lacks_torch

PATH_BYTES = 512  # of the path where ranks meet for torch.distributed


class Rendezvous:
    """The transports available to this rank; `lacks` lists those missing in its stage, and why. Raises CollectiveError if all are.

    `reason` says why the collectives were aborted.
    """

    def __init__(
        self,
        mesh: Mesh,
        host: ShmGroup,
        num_gpus: int,
        *,
        staged_bytes: int,
        timeout_s: float,
        reason: Callable[[], str],
    ) -> None:
        self._mesh, self._host, self._num_gpus, self._timeout_s = mesh, host, num_gpus, timeout_s
        self._rank, self._size = mesh.tp_rank, mesh.tp
        self.lacks: dict[str, str] = {}
        self.peers: PeerMemory | None = None
        self.nccl: NcclComm | None = None
        self.torch: TorchComm | None = None
        self.before: NcclComm | None = None  # with the previous stage, and with the next one
        self.behind: NcclComm | None = None
        if self._size > 1:
            self._open_peers(staged_bytes)
            self._open_nccl()
            if self.peers is None and self.nccl is None:
                self._open_torch(reason)
        self._open_neighbours()

    def all_lacks(self) -> str:
        return "; ".join(f"no {what}: {why}" for what, why in self.lacks.items())

    def _open_peers(self, staged_bytes: int) -> None:
        """Peer memory, if every rank can use it."""
        peers: PeerMemory | None = None
        handle = torch.zeros(PeerMemory.HANDLE_BYTES, dtype=torch.uint8)
        try:
            peers = PeerMemory(self._rank, self._size, pushed_bytes=PUSHED_BYTES, staged_bytes=staged_bytes)
            handle = torch.frombuffer(bytearray(peers.handle()), dtype=torch.uint8)
        except CollectiveError as error:
            self.lacks["peer memory"] = str(error)
            peers = None
        handles = self._host.all_gather(handle, [handle.numel()] * self._size).view(self._size, -1)
        is_open = peers is not None and all(bool(one.any()) for one in handles)
        try:
            if peers is not None and is_open:
                peers.open([bytes(one.tolist()) for one in handles])
        except CollectiveError as error:
            self.lacks["peer memory"] = str(error)
            is_open = False
        if self._everywhere(is_open):
            self.peers = peers
        else:
            self.lacks.setdefault("peer memory", "another rank has none")

    def _open_nccl(self) -> None:
        """A communicator of the stage, if every rank can use NCCL."""
        if len(self._gpus(self._mesh.tp_group())) < self._size:
            self.lacks["NCCL"] = "ranks share a GPU"
            return
        library, made = self._nccl_and_id()
        unique_id, comm = self._of_first(made), None
        if self._everywhere(library is not None) and library is not None:
            try:
                comm = NcclComm(library, unique_id, self._rank, self._size, timeout_s=self._timeout_s)
            except CollectiveError as error:
                self.lacks["NCCL"] = str(error)
            if self._everywhere(comm is not None):
                self.nccl = comm
                return
        if comm is not None:
            comm.abort()
        self.lacks.setdefault("NCCL", "another rank has none")

    def _open_torch(self, reason: Callable[[], str]) -> None:
        if lack := lacks_torch():
            self.lacks["torch.distributed"] = lack
            raise CollectiveError(f"the GPUs of this engine do not reach each other: {self.all_lacks()}")
        folder = tempfile.mkdtemp(prefix="trireme-") if self._rank == 0 else ""
        try:
            named = str(Path(folder, "meeting")).encode().ljust(PATH_BYTES, b"\0")
            path = self._of_first(named).rstrip(b"\0").decode()
            self.torch = TorchComm(path, self._rank, self._size, timeout_s=self._timeout_s, reason=reason)
            self._host.barrier()
        finally:
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _open_neighbours(self) -> None:
        """A communicator with each neighbour stage; without one, stages exchange through the host."""
        mesh = self._mesh
        if not mesh.is_first_stage and len(self._gpus([mesh.worker - mesh.tp, mesh.worker])) == 2:
            unique_id = bytes(self._host.recv_prev((ID_BYTES,), torch.uint8).tolist())
            if any(unique_id):
                self.before = NcclComm(load_nccl(), unique_id, 1, 2, timeout_s=self._timeout_s)
        if not mesh.is_last_stage and len(self._gpus([mesh.worker, mesh.worker + mesh.tp])) == 2:
            library, unique_id = self._nccl_and_id()
            self._host.send_next(torch.frombuffer(bytearray(unique_id), dtype=torch.uint8))
            if library is not None:
                self.behind = NcclComm(library, unique_id, 0, 2, timeout_s=self._timeout_s)

    def _nccl_and_id(self) -> tuple[Nccl | None, bytes]:
        """The library and a fresh id; zeros if it is not available."""
        try:
            library = load_nccl()
            return library, library.unique_id()
        except CollectiveError as error:
            self.lacks["NCCL"] = str(error)
            return None, bytes(ID_BYTES)

    def _gpus(self, workers: list[int]) -> set[int]:
        return {self._mesh.at_worker(worker).gpu(self._num_gpus) for worker in workers}

    def _everywhere(self, is_so: bool) -> bool:
        """Whether `is_so` holds on all ranks of the stage."""
        return bool(self._host.all_gather(torch.tensor([int(is_so)]), [1] * self._size).all())

    def _of_first(self, data: bytes) -> bytes:
        """Rank 0's `data`; all ranks pass the same length."""
        return bytes(self._host.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8)).tolist())

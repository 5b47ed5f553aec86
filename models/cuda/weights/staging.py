"""Uploads bytes of mapped files: threads copy a piece into page-locked memory while the previous one is in flight.

Host memory is bounded by NUM_BUFFERS pieces for any matrix. Called by models/cuda/weights/sources; also works with a CPU
device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from trireme.models.weights.packed import Bytes

PIECE = 32 << 20  # bytes
NUM_BUFFERS = 3
THREADS = 8  # page faults of a mapped file wait for the disk; each copy from memory is bound by one core


class Staging:
    """Uploads byte matrices. Not thread-safe; `close` frees the host memory."""

    def __init__(self, device: torch.device, *, piece: int = PIECE, threads: int = THREADS) -> None:
        self.device, self._piece, self._threads = device, piece, threads
        self._is_cuda = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0
        self._pool = ThreadPoolExecutor(threads, "weights")
        self.sent_bytes = 0

    def send(self, rows: Bytes) -> Tensor:
        """`rows` uint8 [n, row bytes], possibly strided, on the device; ordered on the current stream."""
        n, width = rows.shape
        out = torch.empty(n, width, dtype=torch.uint8, device=self.device)
        step = max(1, self._piece // max(width, 1))
        for start in range(0, n, step):
            part = rows[start : start + step]
            out[start : start + step].copy_(self._filled(part), non_blocking=True)
            self._mark_sent()
        self.sent_bytes += n * width
        return out

    def close(self) -> None:
        """Waits for transfers in flight, then frees the buffers."""
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()
        self._pool.shutdown()
        self._buffers = []

    def _filled(self, part: Bytes) -> Tensor:
        """The next buffer, filled with `part` after its previous transfer has completed."""
        last = self._sent[self._next]
        if last is not None:
            last.synchronize()
        size = max(self._piece, part.shape[1])
        if len(self._buffers) <= self._next:
            self._buffers.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda))
        elif self._buffers[self._next].numel() < part.size:  # one row exceeds a piece
            self._buffers[self._next] = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        buffer = self._buffers[self._next][: part.size].view(part.shape)
        target = buffer.numpy()
        share = -(-part.shape[0] // self._threads)
        jobs = [
            self._pool.submit(np.copyto, target[at : at + share], part[at : at + share])
            for at in range(0, part.shape[0], share)
        ]
        for job in jobs:
            job.result()
        return buffer

    def _mark_sent(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
            self._sent[self._next] = event
        self._next = (self._next + 1) % NUM_BUFFERS

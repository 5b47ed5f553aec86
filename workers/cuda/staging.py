"""Pinned host memory for asynchronous copies: a step's inputs to the device, and its tokens back.

Owned by workers.cuda.runner. Buffers rotate; one is refilled only when the device has read it. On the CPU (tests) the same
copies are synchronous.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]
TURNS = 4  # more than the steps that can be in flight


class Event:
    """A point in the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Waits until the device has reached this point; returns at once if it was never recorded."""
        if self._event is not None:
            self._event.synchronize()

    def has_passed(self) -> bool:
        return self._event is None or self._event.query()


class Upload:
    """int32 uploads to the device, of up to `size` numbers each."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._buffers = [_pinned(size, device) for _ in range(TURNS)]
        self._events = [Event(device) for _ in range(TURNS)]
        self._turn = 0

    def take(self, size: int) -> Ints:
        """Host memory for `size` numbers, to be filled and sent."""
        self._turn = (self._turn + 1) % TURNS
        self._events[self._turn].wait()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = _pinned(2 * size, self._device)
        found: Ints = self._buffers[self._turn].numpy()[:size]
        return found

    def send(self, size: int, out: Tensor | None = None) -> Tensor:
        """Copies the filled buffer to the device: to `out` or to newly allocated memory."""
        held = self._buffers[self._turn][:size]
        sent = (
            held.to(self._device, non_blocking=True, copy=True) if out is None else out.copy_(held, non_blocking=True)
        )
        self._events[self._turn].record()
        return sent


def _pinned(size: int, device: torch.device) -> Tensor:
    return torch.empty(max(size, 1), dtype=torch.int32, pin_memory=device.type == "cuda")


class Answer:
    """Tokens [n] of one step, and their further outputs, being copied to the host."""

    def __init__(self, tokens: Tensor, more: Tensor | None = None) -> None:
        self._tokens = _sent_back(tokens)
        self._more = None if more is None else _sent_back(more)
        self._event = Event(tokens.device)
        self._event.record()

    def has_come(self) -> bool:
        return self._event.has_passed()

    def read(self) -> Ints:
        """Waits for the tokens. Callable from any thread, any number of times."""
        self._event.wait()
        found: Ints = self._tokens.numpy()
        return found

    def read_more(self) -> Ints | None:
        """The further outputs, likewise."""
        self._event.wait()
        return None if self._more is None else self._more.numpy()


def _sent_back(values: Tensor) -> Tensor:
    found = _pinned(values.numel(), values.device)[: values.numel()].view(values.shape)
    return found.copy_(values, non_blocking=True)

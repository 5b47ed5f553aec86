"""Offloads a model's weights from the GPU to page-locked host memory and restores them. Called by workers.cuda.worker.

Tensor objects persist: their storages are resized to 0 and refilled, so every view, and every layer that holds one, is valid
again after a restore. Addresses may change: CUDA graphs must be captured anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

_OURS = "trireme.models.cuda."


def tensors_of(model: Any) -> list[Tensor]:
    """The tensors that a model and its layers hold in lists and attributes; objects of other modules (groups) are skipped."""
    return list(_tensors_in(model, set()))


def _tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _tensors_in(part, seen)
    elif type(thing).__module__.startswith(_OURS):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        for name in [*slots, *getattr(thing, "__dict__", {})]:
            yield from _tensors_in(getattr(thing, name, None), seen)


class OffloadedWeights:
    """Tensors of one device; shared storages are offloaded once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        own = [storage for storage in storages if storage.nbytes() and storage.resizable()]  # not borrowed memory
        self._storages = list({storage.data_ptr(): storage for storage in own}.values())
        self._kept: list[Tensor] = []
        self.nbytes = sum(storage.nbytes() for storage in self._storages)

    def offload(self) -> None:
        """Copies the storages to the host and frees them on the device."""
        for storage in self._storages:
            bytes_there = _bytes_of(storage)
            kept = torch.empty(bytes_there.shape, dtype=torch.uint8, pin_memory=bytes_there.is_cuda)
            self._kept.append(kept.copy_(bytes_there, non_blocking=True))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Refills the same tensors. Raises torch.OutOfMemoryError if the device has no room; the host copies are kept then."""
        for storage, kept in zip(self._storages, self._kept, strict=True):
            storage.resize_(kept.numel())
            _bytes_of(storage).copy_(kept, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._kept = []


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

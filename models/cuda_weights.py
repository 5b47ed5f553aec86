"""Weights on their way to a GPU: from a model's files, or noise made there. Called by models/arch/cuda while it is built.

Dense matrices travel as they lie in the file and are rounded on the device; blocks of GGUF files are expanded on the way.
"""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from models.dummy import DEVIATION, DummySource
from models.quant.packed import Floats
from models.tensors import tensor_from_raw
from models.weights import WeightSource


class DeviceWeights(Protocol):
    """Weights by Hugging Face name, matrices already where they are computed with."""

    def names(self) -> set[str]: ...

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        """[n, k] on the device, in the model's dtype. Raises ModelError for another shape in the file."""
        ...

    def vector(self, name: str, size: int) -> Floats:
        """Float32 on the host."""
        ...


class StoredWeights:
    """Those of a model's files."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device

    def names(self) -> set[str]:
        return self._source.names()

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        return tensor_from_raw(self._source.matrix(name, n, k)).to(self._device).to(self._dtype)

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(name, size)


class NoiseWeights:
    """Noise in place of matrices, made on the device; vectors as a DummySource has them."""

    def __init__(self, source: DummySource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        self._generator = torch.Generator(device)

    def names(self) -> set[str]:
        return self._source.names()

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        self._generator.manual_seed(crc32(name.encode()))  # the same for every rank that makes some of them
        weight = torch.empty(n, k, dtype=self._dtype, device=self._device)
        return weight.normal_(std=DEVIATION, generator=self._generator)

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(name, size)


def device_weights(source: WeightSource, dtype: torch.dtype, device: torch.device) -> DeviceWeights:
    """How the matrices of `source` come to the device."""
    if isinstance(source, DummySource):
        return NoiseWeights(source, dtype, device)
    return StoredWeights(source, dtype, device)

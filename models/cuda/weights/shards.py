"""A rank's shard of a model's weights on its GPU: read from the files, or sliced from the noise of a single-GPU model.

Called by workers.cuda.worker; extends models.cuda.weights.sources.device_weights to tensor parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trireme.models.cuda.weights.sources import DeviceWeights, NoiseWeights, device_weights
from trireme.models.weights.dummy import DummySource
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import WeightSource
from trireme.models.weights.tp_shards import RankSpans, ShardSource


class NoiseShards(NoiseWeights):
    """A slice of each matrix of NoiseWeights, so that all topologies use the same weights."""

    def __init__(
        self, source: DummySource, dtype: torch.dtype, device: torch.device, shares: RankSpans, **more: Any
    ) -> None:
        super().__init__(source, dtype, device, **more)
        self._shares = shares

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        cut = self._shares.cut(name)
        whole = super().matrix(name, cut.n, cut.k)
        return whole[cut.rows.start : cut.rows.stop, cut.columns.start : cut.columns.stop].clone()

    def vector(self, name: str, size: int) -> Floats:
        return self._shares.own(self._source, name, size)


def own_weights(
    source: WeightSource, dtype: torch.dtype, device: torch.device, shares: RankSpans, **more: Any
) -> DeviceWeights:
    """The DeviceWeights for this rank's shard of `source`. `more` is passed to device_weights."""
    if shares.are_all:
        return device_weights(source, dtype, device, **more)
    if isinstance(source, DummySource):
        return NoiseShards(source, dtype, device, shares, **more)
    return device_weights(ShardSource(source, shares), dtype, device, **more)

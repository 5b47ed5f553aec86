"""Random weights: a model of the right shapes filled with noise, to measure speed without its files.

Called by models/load for `--load-format dummy`. All matrices repeat one noise buffer, which makes them cheap to build.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trireme.model.spec import ArchSpec
from trireme.models.weights.packed import Floats, row_bytes
from trireme.models.weights.sources import RawMatrix, raw_from_floats

DEVIATION = 0.02
_NOISE = 1 << 20  # values before the noise repeats
_KIND_OF = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class DummySource:
    """A WeightSource with every weight in `names`, in the dtype that the model's files would have."""

    def __init__(self, arch: ArchSpec, names: Iterable[str], path: Path) -> None:
        self.path = path
        self._names = set(names)
        self.weights_kind = arch.weights_kind
        self._norm = 1.0 - arch.norm_offset
        self._kind = _KIND_OF.get(arch.weights_dtype, "BF16")
        noise = np.random.default_rng(0).standard_normal((1, _NOISE), np.float32) * np.float32(DEVIATION)
        self._noise = raw_from_floats(noise, self._kind).raw.reshape(-1)

    def names(self) -> set[str]:
        return self._names

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        """[n, k], the noise repeated."""
        return RawMatrix(self._kind, np.resize(self._noise, (n, row_bytes(self._kind, k))), n, k)

    def vector(self, name: str, size: int) -> Floats:
        """Norm weights that act as 1, zero biases."""
        return np.full(size, 0.0 if name.endswith(".bias") else self._norm, np.float32)

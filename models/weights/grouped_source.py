"""A packed-integer checkpoint as a WeightSource: builds `X.weight` from X.qweight, X.qzeros, X.scales and X.g_idx (GPTQ, AWQ),
or from compressed-tensors' X.weight_packed and its companions. models/load wraps the files in it; other tensors pass through.
"""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trireme.errors import ModelError
from trireme.model.packed_ints import Packing
from trireme.models.weights.grouped import (
    Grouped,
    codes_of,
    from_awq,
    from_compressed,
    from_gptq,
    groups_in_turn,
    rows_of,
)
from trireme.models.weights.packed import Floats
from trireme.models.weights.sources import RawMatrix, SafetensorsSource

_OLD = (".qweight", ".qzeros", ".scales", ".g_idx")
_COMPRESSED = tuple(".weight_" + part for part in ("packed", "zero_point", "scale", "g_idx", "shape"))


class GroupedSource:
    """`wanted` are the model's weight names: zero biases that some writers add to every layer are dropped."""

    def __init__(self, source: SafetensorsSource, packing: Packing, wanted: Set[str]) -> None:
        self.path: Path = source.path
        self._source, self._packing = source, packing
        self._parts = _COMPRESSED if packing.method == "pack-quantized" else _OLD
        stored = source.names()
        self._stored = stored
        self._stems = {name.removesuffix(self._parts[0]) for name in stored if name.endswith(self._parts[0])}
        for stem in sorted(self._stems):
            if stem + ".weight" in stored:
                raise ModelError(
                    f"{self.path} holds {stem}.weight twice: as it is, and packed in {stem}{self._parts[0]}"
                )
        packed = {stem + part for stem in self._stems for part in self._parts}
        plain = {name for name in stored - packed if not self._is_idle_bias(name, wanted)}
        self._names = plain | {stem + ".weight" for stem in self._stems}

    def names(self) -> set[str]:
        return self._names

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        stem = name.removesuffix(".weight")
        if stem not in self._stems:
            return self._source.matrix(name, n, k)
        return RawMatrix(*rows_of(self._grouped(stem, n, k)), n, k)

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(name, size)

    def _grouped(self, stem: str, n: int, k: int) -> Grouped:
        how = self._packing
        per_word = 32 // how.bits
        for what, size in (("inputs", k), ("outputs", n)):
            if size % per_word:
                raise ModelError(f"{stem} in {self.path} has {size} {what}; packed are multiples of {per_word}")
        groups = 1 if how.group_size < 0 else -(-k // how.group_size)
        codes, zeros, scales, _ = (stem + part for part in self._parts[:4])
        group_of = self._group_of(stem + self._parts[3], k, groups)
        if how.method == "gptq":
            qzeros = self._whole(zeros, groups, n // per_word)
            return from_gptq(
                how.bits,
                self._whole(codes, k // per_word, n),
                qzeros,
                self._floats(scales, groups, n),
                group_of,
                self._offset_of_symmetric(zeros, qzeros) if how.is_symmetric else how.zero_offset,
            )
        if how.method == "awq":
            qweight, qzeros = self._whole(codes, k, n // per_word), self._whole(zeros, groups, n // per_word)
            return from_awq(qweight, qzeros, self._floats(scales, groups, n), group_of)
        self._check_shape(stem + self._parts[4], n, k)
        has_zeros = zeros in self._stored if how.is_symmetric else True  # stored zeros apply even if symmetric
        stored_zeros = self._whole(zeros, n // per_word, groups) if has_zeros else None
        return from_compressed(
            how.bits, self._whole(codes, n, k // per_word), self._floats(scales, n, groups), stored_zeros, group_of
        )

    def _offset_of_symmetric(self, name: str, words: NDArray[np.int32]) -> int:
        """The offset that brings every stored zero to the middle of the code range. Writers mislabel the two GPTQ versions of
        a file; with `sym` the zeros are known."""
        how, middle = self._packing, 1 << (self._packing.bits - 1)
        stored = np.unique(codes_of(words, how.bits)).tolist()
        if len(stored) > 1 or stored[0] not in (middle, middle - 1):
            shown = ", ".join(map(str, stored[:4]))
            raise ModelError(
                f"{name} in {self.path} holds zeros of {shown}; sym true in quantization_config means {middle} "
                f"({middle - 1} where one is to be added)",
                hint="set sym to false in config.json if the checkpoint is not symmetric",
            )
        return middle - stored[0]

    def _check_shape(self, name: str, n: int, k: int) -> None:
        """Raises ModelError if the shape that compressed-tensors may store beside the codes is not [n, k]."""
        if name in self._stored:
            stored = self._source.tensor(name, (2,))
            told = stored.raw.view(np.int64 if stored.dtype == "I64" else np.int32).tolist()
            if told != [n, k]:
                raise ModelError(f"{name} in {self.path} says {told}; config.json asks for {[n, k]}")

    def _group_of(self, name: str, k: int, groups: int) -> NDArray[np.intp]:
        how = self._packing
        if not (how.is_scattered or name in self._stored):
            return groups_in_turn(k, how.group_size)
        found = self._whole(name, k)
        if found.min() < 0 or found.max() >= groups:
            raise ModelError(f"{name} in {self.path} names groups {found.min()} to {found.max()}; there are {groups}")
        return found.astype(np.intp)

    def _whole(self, name: str, *shape: int) -> NDArray[np.int32]:
        """An int32 tensor. Raises ModelError for another dtype."""
        stored = self._source.tensor(self._present(name), shape)
        if stored.dtype != "I32":
            raise ModelError(f"{name} in {self.path} has dtype {stored.dtype}; supported: I32")
        return stored.raw.view(np.int32).reshape(shape)

    def _floats(self, name: str, *shape: int) -> Floats:
        """A tensor of scales. Raises ModelError unless all are finite."""
        self._source.tensor(self._present(name), shape)
        values = self._source.vector(name, math.prod(shape)).reshape(shape)
        if not np.isfinite(values).all():
            raise ModelError(f"{name} in {self.path} holds scales that are not finite")
        return values

    def _present(self, name: str) -> str:
        if name not in self._stored:
            raise ModelError(f"{self.path} lacks {name}, which belongs to packed weights ({self._packing.method})")
        return name

    def _is_idle_bias(self, name: str, wanted: Set[str]) -> bool:
        if not name.endswith(".bias") or name in wanted or name.removesuffix(".bias") not in self._stems:
            return False
        return not self._source.vector(name, self._source.size(name)).any()

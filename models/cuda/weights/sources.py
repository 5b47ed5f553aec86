"""Uploads weights to a GPU, from a model's files or as noise generated there. Called by models/cuda/decoder while it is built.

Matrices are sent in their stored form (models/cuda/weights/staging) and quantized or repacked on the device; GGUF quant blocks
without a GPU kernel are dequantized on the host. trireme.machine.gpu_formats decides the format of each matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from trireme.machine.gpu_formats import format_of
from trireme.models.cuda.layers.linear import DeviceMatrix
from trireme.models.cuda.layers.quantize import (
    fp8_blocks_from,
    fp8_blocks_layout,
    fp8_from,
    int8_from,
    q4_k_from,
    w4_from,
    w4_layout,
)
from trireme.models.cuda.weights.gguf_blocks import laid_out
from trireme.models.cuda.weights.staging import THREADS, Staging
from trireme.models.weights.dummy import DEVIATION, DummySource
from trireme.models.weights.packed import GROUPED, Floats
from trireme.models.weights.sources import DENSE_KINDS, RawMatrix, TensorSource, WeightSource
from trireme.topology.mesh import Span

ROUNDED: dict[str, Callable[[Tensor], DeviceMatrix]] = {
    "half": lambda dense: DeviceMatrix("half", dense),
    "fp8": lambda dense: DeviceMatrix("fp8", *fp8_from(dense)),
    "int8": lambda dense: DeviceMatrix("int8", *int8_from(dense)),
    "q4_k": lambda dense: DeviceMatrix("q4_k", q4_k_from(dense)),
    "w4_32": lambda dense: DeviceMatrix("w4_32", *w4_from(dense, 32)),
    "w4_64": lambda dense: DeviceMatrix("w4_64", *w4_from(dense, 64)),
    "w4_128": lambda dense: DeviceMatrix("w4_128", *w4_from(dense, 128)),
    "fp8_blocks": lambda dense: DeviceMatrix("fp8_blocks", *fp8_blocks_from(dense)),
}
"""Quantizes a dense matrix to each format."""
_EXPANDED = 1 << 22  # values dequantized per job
_MXFP4_SCALE = 120  # 2^-7
_SCALED = {"FP8": torch.float8_e4m3fn, "INT8": torch.int8}  # kinds that store each output's scale before its values
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _format(kind: str, n: int, k: int, scheme: str | None) -> str:
    """trireme.machine.gpu_formats.format_of, except that torch._scaled_mm's float8 also needs N to be a multiple of 16."""
    form = format_of(kind, k, scheme)
    return "half" if form == "fp8" and n % 16 else form


class DeviceWeights(Protocol):
    """Weights by Hugging Face name, matrices on the device."""

    def names(self) -> set[str]: ...

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        """[n, k] on the device, in the model's dtype. Raises ModelError for another shape in the file."""
        ...

    def factor(self, name: str, n: int, k: int) -> DeviceMatrix:
        """The matrix as a linear layer's weight, in its compute format."""
        ...

    def vector(self, name: str, size: int) -> Floats:
        """Float32 on the host."""
        ...

    def experts(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """Each expert's part of a tensor of `shape`, in its stored dtype, on the device; unsharded on every rank."""
        ...

    def close(self) -> None:
        """Frees the host's staging memory; no weight may be requested afterwards."""
        ...


class StoredWeights:
    """Weights of a model's files. `scheme` (of gpu_formats.SCHEMES) quantizes matrices that have no compute format of their
    own."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, *, scheme: str | None = None
    ) -> None:
        self._source, self._dtype, self._scheme = source, dtype, scheme
        self._staging = Staging(device)
        self._expanders = ThreadPoolExecutor(THREADS, "blocks")

    def names(self) -> set[str]:
        return self._source.names()

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        return self._dense(self._source.matrix(name, n, k))

    def factor(self, name: str, n: int, k: int) -> DeviceMatrix:
        """DeviceWeights.factor: the stored form if a kernel computes with it, else quantized; the head ignores `scheme`."""
        raw = self._source.matrix(name, n, k)
        scheme = None if name.startswith("lm_head") else self._scheme
        form = _format(raw.kind, n, k, scheme)
        if form == _format(raw.kind, n, k, None) != "half":
            return self._as_it_lies(form, raw)
        return ROUNDED[form](self._dense(raw))

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(name, size)

    def experts(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        for part in cast(TensorSource, self._source).tensor(name, shape):
            rows = part.contiguous().view(part.shape[0] if part.dim() > 1 else 1, -1)
            yield self._staging.send(rows.view(torch.uint8).numpy()).view(part.dtype).view(part.shape)

    def close(self) -> None:
        self._staging.close()
        self._expanders.shutdown()

    def _dense(self, raw: RawMatrix) -> Tensor:
        if raw.kind not in DENSE_KINDS:
            return self._expanded(raw)
        return self._staging.send(raw.raw).view(_TYPES[raw.kind]).view(raw.n, raw.k).to(self._dtype)

    def _expanded(self, raw: RawMatrix) -> Tensor:
        """Dequantizes on host threads, which run a few parts ahead of the upload."""
        out = torch.empty(raw.n, raw.k, dtype=self._dtype, device=self._staging.device)
        step = max(1, _EXPANDED // raw.k)
        spans = [Span(start, min(start + step, raw.n)) for start in range(0, raw.n, step)]
        ahead = deque[Future[Floats]]()
        for done, span in enumerate(spans):
            for other in spans[done + len(ahead) : done + 2 * THREADS]:
                ahead.append(self._expanders.submit(raw.rows(other).as_float32))
            part = ahead.popleft().result()
            out[span.start : span.stop].copy_(self._staging.send(part.view(np.uint8)).view(torch.float32))
        return out

    def _as_it_lies(self, form: str, raw: RawMatrix) -> DeviceMatrix:
        """Uploads the stored form and repacks it on the device."""
        sent = self._staging.send(raw.raw)
        if raw.kind in GROUPED:
            return DeviceMatrix(form, *w4_layout(sent, GROUPED[raw.kind]))
        if raw.kind == "FP8_BLOCKS":
            return DeviceMatrix(form, *fp8_blocks_layout(sent))
        if raw.kind not in _SCALED:
            return DeviceMatrix(form, laid_out(raw.kind, sent, raw.k))
        scale = sent[:, :4].contiguous().view(torch.float32).view(-1)
        return DeviceMatrix(form, sent[:, 4:].contiguous().view(_SCALED[raw.kind]), scale)


class NoiseWeights:
    """Matrices of noise, generated on the device; vectors of a DummySource."""

    def __init__(
        self, source: DummySource, dtype: torch.dtype, device: torch.device, *, scheme: str | None = None
    ) -> None:
        self._source, self._dtype, self._device, self._scheme = source, dtype, device, scheme
        self._generator = torch.Generator(device)

    def names(self) -> set[str]:
        return self._source.names()

    def matrix(self, name: str, n: int, k: int) -> Tensor:
        self._generator.manual_seed(crc32(name.encode()))  # the same weights on every rank
        weight = torch.empty(n, k, dtype=self._dtype, device=self._device)
        return weight.normal_(std=DEVIATION, generator=self._generator)

    def factor(self, name: str, n: int, k: int) -> DeviceMatrix:
        scheme = None if name.startswith("lm_head") else self._scheme
        return ROUNDED[_format(self._source.weights_kind, n, k, scheme)](self.matrix(name, n, k))

    def vector(self, name: str, size: int) -> Floats:
        return self._source.vector(name, size)

    def experts(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        self._generator.manual_seed(crc32(name.encode()))
        for _ in range(shape[0]):
            yield self._part(name, shape[1:])

    def _part(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One expert's part; MXFP4 gets random codes with a scale that matches the other noise."""
        if name.endswith("_blocks"):
            codes = torch.empty(shape, dtype=torch.uint8, device=self._device)
            return codes.random_(0, 256, generator=self._generator)
        if name.endswith("_scales"):
            return torch.full(shape, _MXFP4_SCALE, dtype=torch.uint8, device=self._device)
        if name.endswith("_bias"):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        return weight.normal_(std=DEVIATION, generator=self._generator)

    def close(self) -> None:
        pass


def device_weights(
    source: WeightSource, dtype: torch.dtype, device: torch.device, *, scheme: str | None = None
) -> DeviceWeights:
    """The DeviceWeights for `source`."""
    if isinstance(source, DummySource):
        return NoiseWeights(source, dtype, device, scheme=scheme)
    return StoredWeights(source, dtype, device, scheme=scheme)

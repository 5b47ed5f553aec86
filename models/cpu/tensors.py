"""Converts between the worker's numpy arrays and torch bodies: views of the same memory in both directions.

Imported only by torch code; a process whose model runs natively never loads it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.errors import ModelError
from trireme.models.cpu.packed_ops import bytes_of, row_bytes
from trireme.models.forward import (
    ForwardBatch,
    Group,
    HostBatch,
    HostKV,
    KVLayer,
    Logits,
    TensorModel,
)
from trireme.models.weights.packed import address_of
from trireme.models.weights.safetensors_file import StoredTensor
from trireme.models.weights.sources import RawMatrix

_DENSE_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
}


class OverTensors:
    """Adapts a torch body to models.forward.Model."""

    def __init__(self, body: TensorModel) -> None:
        self.body = body
        self.vocab_size = body.vocab_size
        self.num_kv_layers = body.num_kv_layers
        self.kv_heads, self.head_dim = body.kv_heads, body.head_dim
        self._seen: list[HostKV] | None = None
        self._kv: list[KVLayer] = []

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits | None:
        if kv is not self._seen:
            self._seen, self._kv = kv, [kv_tensors(layer) for layer in kv]
        with torch.inference_mode():
            logits = self.body.forward(batch_tensors(batch), self._kv)
        return None if logits is None else logits.float().cpu().numpy()

    def dummy_forward(self) -> None:
        """Dummy step for expert-parallel lockstep: no tokens of its own."""
        with torch.inference_mode():
            self.body.dummy_forward()  # type: ignore[attr-defined]


def batch_tensors(batch: HostBatch) -> ForwardBatch:
    """Views of a step's inputs."""
    view = torch.from_numpy
    return ForwardBatch(
        view(batch.token_ids),
        view(batch.positions),
        view(batch.slots),
        view(batch.query_start),
        view(batch.context_len),
        view(batch.block_table),
        view(batch.logits_index),
        view(batch.choices),
        view(batch.num_prompt),
    )


def kv_tensors(layer: HostKV) -> KVLayer:
    """Views of a layer's KV memory."""
    return KVLayer(_kv_tensor(layer.k), _kv_tensor(layer.v))


def _kv_tensor(array: NDArray[Any]) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensor_from_stored(stored: StoredTensor) -> Tensor:
    """A safetensors tensor in its stored dtype: a view of the mapped file if aligned, else a copy. Raises ModelError for an
    unsupported dtype."""
    if stored.dtype not in _DTYPES:
        raise ModelError(f"tensors of type {stored.dtype} are not supported")
    dtype, raw = _DTYPES[stored.dtype], stored.raw
    if raw.size and address_of(raw) % dtype.itemsize:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype).view(stored.shape)


def tensor_from_raw(matrix: RawMatrix) -> Tensor:
    """A matrix as [n, k]: in the stored dtype if dense (a view, or a copy if misaligned or read-only), else float32."""
    dtypes = {kind: dtype for dtype, kind in _DENSE_KINDS.items()}
    if matrix.kind not in dtypes:
        return torch.from_numpy(matrix.as_float32())
    raw = bytes_of(matrix.raw)
    if address_of(raw) % dtypes[matrix.kind].itemsize or not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtypes[matrix.kind]).view(matrix.n, matrix.k)


def raw_from_tensor(tensor: Tensor) -> RawMatrix:
    """A dense [n, k] tensor as a raw matrix, without a copy if contiguous. Raises ModelError for other dtypes."""
    n, k = tensor.shape
    if tensor.dtype not in _DENSE_KINDS:
        raise ModelError(f"weights of dtype {tensor.dtype} are not supported; supported: float32, float16, bfloat16")
    kind = _DENSE_KINDS[tensor.dtype]
    return RawMatrix(kind, bytes_of(tensor).reshape(n, row_bytes(kind, k)), n, k)


def gather_tokens(group: Group, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Broadcasts rank 0's `tokens` to every rank of a stage."""
    gathered = group.all_gather(torch.from_numpy(tokens)[None], [tokens.size] * group.size)
    return gathered[0, : tokens.size].numpy()


def send_next(group: Group, hidden: NDArray[np.float32]) -> None:
    """Sends hidden states [T, H] to the next stage."""
    group.send_next(torch.from_numpy(hidden))


def receive_prev(group: Group, hidden: NDArray[np.float32]) -> None:
    """Receives the previous stage's hidden states into `hidden` [T, H]."""
    np.copyto(hidden, group.recv_prev(hidden.shape, torch.float32).numpy())


def use_threads(count: int) -> None:
    """Sets the size of torch's thread pool."""
    torch.set_num_threads(count)

"""Paged KV memory of one worker: element type, bytes per block, allocation, block copies.

Called by workers.cpu.worker (sizes, allocation), workers.cpu.runner and workers.cuda.steps (copies). Layout:
models.forward.PagedKV.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.config import Decision
from trireme.errors import ConfigError
from trireme.model.reader import ArchSpec
from trireme.models.cpu.kv_layout import can_be_integers, fill_nan, kv_shapes
from trireme.models.forward import HostKV, KVShape
from trireme.sizes import format_bytes

KvDtype = np.dtype[Any]
# bfloat16 is kept as its bits
KV_DTYPES: dict[str, KvDtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
}
_ALIGNMENT = 64  # of every block, in bytes: vector loads then stay within a cache line


def choose_kv_dtype(asked: str, arch: ArchSpec, block_size: int) -> tuple[KvDtype, Decision]:
    """Element type of keys and values for `--kv-dtype`. auto: as precise as the weights, so float32 only for float32 weights.

    Raises ConfigError for integers where the head_dim or the block size is odd.
    """
    if asked.startswith("int") and not can_be_integers(arch.head_dim, block_size):
        raise ConfigError(
            f"--kv-dtype {asked} needs an even head_dim and block size; they are {arch.head_dim} and {block_size}",
            hint="--kv-dtype float16",
        )
    if asked != "auto":
        return KV_DTYPES[asked], Decision("kv dtype", asked, "--kv-dtype was given")
    if arch.source != "gguf" and arch.weights_dtype == "float32":
        return KV_DTYPES["float32"], Decision("kv dtype", "float32", "the weights are float32")
    name = "int16" if can_be_integers(arch.head_dim, block_size) else "float16"
    return KV_DTYPES[name], Decision(
        "kv dtype", name, f"the weights are {arch.weights_dtype}; half the memory of float32"
    )


def block_bytes(model: KVShape, block_size: int, dtype: KvDtype) -> int:
    """Bytes of one block on this worker: keys and values of all layers of its stage."""
    shapes = kv_shapes(1, model.kv_heads, model.head_dim, block_size, dtype.name)
    return model.num_kv_layers * dtype.itemsize * sum(math.prod(shape) for shape in shapes)


def allocate_kv(model: KVShape, num_blocks: int, block_size: int, dtype: KvDtype) -> list[HostKV]:
    """Zeroed KV of every layer of this stage. Pages are allocated as blocks are first used. Raises ConfigError when the address
    range cannot be reserved."""
    k_shape, v_shape = kv_shapes(num_blocks, model.kv_heads, model.head_dim, block_size, dtype.name)
    try:
        return [
            HostKV(k=_untouched_zeros(k_shape, dtype), v=_untouched_zeros(v_shape, dtype))
            for _ in range(model.num_kv_layers)
        ]
    except (MemoryError, ValueError) as error:
        size = num_blocks * block_bytes(model, block_size, dtype)
        raise ConfigError(
            f"the system does not give {format_bytes(size)} for {num_blocks} KV blocks: {error}",
            hint="a smaller --kv-memory",
        ) from error


def _untouched_zeros(shape: tuple[int, ...], dtype: KvDtype) -> NDArray[Any]:
    """Zeros whose pages are allocated on first use."""
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def independent(copies: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The copies in batches that can run in any order: in one batch no destination is a source, or another's destination."""
    batches: list[list[tuple[int, int]]] = []
    sources, destinations = set[int](), set[int]()
    for source, destination in copies:
        if source == destination:
            continue
        if not batches or source in destinations or destination in sources or destination in destinations:
            batches.append([])
            sources, destinations = set(), set()
        batches[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return batches


def copy_blocks(kv: list[HostKV], copies: list[tuple[int, int]]) -> None:
    """Copies (source, destination) blocks of all layers, as if sequentially."""
    for batch in independent(copies):
        source, destination = [pair[0] for pair in batch], [pair[1] for pair in batch]
        for layer in kv:
            layer.k[destination] = layer.k[source]
            layer.v[destination] = layer.v[source]


def poison_blocks(kv: list[HostKV], blocks: list[int]) -> None:
    """Fills blocks with NaN, so that a test detects any read of an unwritten block."""
    for layer in kv:
        fill_nan(layer.k, blocks)
        fill_nan(layer.v, blocks)

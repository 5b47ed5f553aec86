"""Allocates the paged KV tensors of one worker and does their arithmetic: element type, bytes per block, block copies.

Called by workers.worker (sizes, allocation) and workers.runner (copies). Layout: models.forward.KVLayer.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from models.forward import KVLayer, Model
from trireme.arch import ArchSpec
from trireme.config import Decision

KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def choose_kv_dtype(asked: str, arch: ArchSpec) -> tuple[torch.dtype, Decision]:
    """Element type of keys and values for `--kv-dtype`. auto: as exact as the weights, so float32 only under float32 ones."""
    if asked != "auto":
        return KV_DTYPES[asked], Decision("kv dtype", asked, "--kv-dtype was given")
    if arch.source != "gguf" and arch.weights_dtype == "float32":
        return torch.float32, Decision("kv dtype", "float32", "the weights are float32")
    return torch.float16, Decision(
        "kv dtype", "float16", f"the weights are {arch.weights_dtype}; half the memory of float32"
    )


def block_bytes(model: Model, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block costs on this worker: keys and values of all layers of its stage."""
    return 2 * model.num_kv_layers * model.kv_heads * model.head_dim * block_size * dtype.itemsize


def allocate_kv(model: Model, num_blocks: int, block_size: int, dtype: torch.dtype) -> list[KVLayer]:
    """Zeroed KV of every layer of this stage. Pages are taken from the system as blocks are first used."""
    heads, dim = model.kv_heads, model.head_dim
    return [
        KVLayer(
            k=_untouched_zeros((num_blocks, heads, dim, block_size), dtype),
            v=_untouched_zeros((num_blocks, heads, block_size, dim), dtype),
        )
        for _ in range(model.num_kv_layers)
    ]


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that cost nothing until they are used: numpy asks for fresh pages, torch.zeros would write every one."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def copy_blocks(kv: list[KVLayer], copies: list[tuple[int, int]]) -> None:
    """Copies (source, destination) blocks of all layers, as if one after the other."""
    if not copies:
        return
    sources, destinations = {source for source, _ in copies}, {destination for _, destination in copies}
    is_independent = sources.isdisjoint(destinations) and len(destinations) == len(copies)
    for batch in [copies] if is_independent else [[pair] for pair in copies]:
        source = torch.tensor([pair[0] for pair in batch])
        destination = torch.tensor([pair[1] for pair in batch])
        for layer in kv:
            layer.k[destination] = layer.k[source]
            layer.v[destination] = layer.v[source]


def poison_blocks(kv: list[KVLayer], blocks: list[int]) -> None:
    """Fills blocks with NaN, so that a test sees any read of a block that nobody wrote."""
    for layer in kv:
        layer.k[blocks] = float("nan")
        layer.v[blocks] = float("nan")

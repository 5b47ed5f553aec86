"""Reads and writes tokens in paged KV in plain torch, for the reference ops and torch bodies. Layout: models/cpu/kv_layout.

Legend: N blocks or tokens, H KV heads, D head_dim, S block size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cpu.kv_layout import LARGEST, unit_rows
from trireme.models.forward import KVLayer


def dtype_name(kv: KVLayer) -> str:
    return str(kv.k.dtype).removeprefix("torch.")


def head_dim_of(kv: KVLayer) -> int:
    return kv.k.shape[2] - unit_rows(dtype_name(kv))


def read_blocks(kv: KVLayer, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [H, N * S, D] of the given blocks, as float32."""
    heads, dim, size = kv.k.shape[1], head_dim_of(kv), kv.k.shape[3]
    if dtype_name(kv) in LARGEST:
        keys, key_units, values, value_units = _integer_views(KVLayer(kv.k[blocks], kv.v[blocks]))
        k = keys.permute(1, 0, 3, 2, 4).reshape(heads, -1, dim) * key_units.transpose(0, 1).reshape(heads, -1, 1)
        v = values.permute(1, 0, 2, 4, 3).reshape(heads, -1, dim) * value_units.transpose(0, 1).reshape(heads, -1, 1)
        return k, v
    k = kv.k[blocks].permute(1, 0, 3, 2).reshape(heads, len(blocks) * size, dim)
    v = kv.v[blocks].permute(1, 0, 2, 3).reshape(heads, len(blocks) * size, dim)
    return k.float(), v.float()


def write_tokens(kv: KVLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Stores keys and values [N, H, D] of one token per slot (block * S + offset)."""
    size = kv.k.shape[3]
    block, offset = slots // size, slots % size
    if dtype_name(kv) not in LARGEST:
        kv.k[block, :, :, offset] = k.to(kv.k.dtype)
        kv.v[block, :, offset] = v.to(kv.v.dtype)
        return
    largest = LARGEST[dtype_name(kv)]
    keys, key_units, values, value_units = _integer_views(kv)
    extent = k.abs().amax(-1) if kv.k.dtype is torch.int8 else k.float().square().sum(-1).sqrt()
    key_units[block, :, offset] = extent / largest
    keys[block, :, :, offset] = _rounded(k, extent / largest).unflatten(-1, (-1, 2)).to(kv.k.dtype)
    extent = v.abs().amax(-1)
    value_units[block, :, offset] = extent / largest
    values[block, :, offset // 2, :, offset % 2] = _rounded(v, extent / largest).to(kv.v.dtype)


def _rounded(x: Tensor, units: Tensor) -> Tensor:
    return (x * torch.where(units > 0, 1 / units, 0.0).unsqueeze(-1)).round()


def _integer_views(kv: KVLayer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k as [N, H, D / 2, S, 2] and its scales [N, H, S], v as [N, H, S / 2, D, 2] and its scales."""
    dim, size = head_dim_of(kv), kv.k.shape[3]
    k, v = kv.k.flatten(2), kv.v.flatten(2)
    keys = k[..., : dim * size].unflatten(-1, (dim // 2, size, 2))
    values = v[..., : dim * size].unflatten(-1, (size // 2, dim, 2))
    return keys, k.view(torch.float32)[..., -size:], values, v.view(torch.float32)[..., -size:]

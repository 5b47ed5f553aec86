"""Protocol of linear layers on the GPU. Implemented by the other modules here, called by models/cuda/decoder."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trireme.models.cuda.ops import Scales


def empty_quantized_like(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialized (values [T, k] of the one-byte `dtype`, scale [T] float32) for quantizing x [T, k]."""
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


class LinearLayer(Protocol):
    """y = x W^T + b for x [T, k]; immutable."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes y into `out` [T, n], which may be strided between tokens, and returns it."""
        ...

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        """The one-byte dtype to quantize `num_rows` tokens to, for forward_quantized or unscaled; None: 16-bit input."""
        ...

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """y for quantized input: x [T, k] of that dtype times scale [T]. Returns `out`."""
        ...

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        """Like forward_quantized, but returns the scales for the reader of `out` to apply; None if already applied."""
        ...


class OfHalves:
    """A linear layer that takes 16-bit input only."""

    __slots__ = ()

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        return None

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        raise NotImplementedError

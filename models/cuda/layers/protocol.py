"""What every product with a weight on the GPU can do. Kept by models/cuda/layers/linear and cuda_narrow, called by models/arch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from trireme.models.cuda.ops import Scales


def empty_quantized_like(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Room for x [T, k] in a type of one byte, and for a scale of each row."""
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


class LinearLayer(Protocol):
    """y = x W^T + b for x [T, k]; never changes."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the product into `out` [T, n], whose rows may be strided, and returns it."""
        ...

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        """In which type of one byte so many rows are best given, to one of the next two; None: as they are."""
        ...

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """The product of x [T, k] of that type times scale [T]."""
        ...

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        """As of_narrow, but for the scales, which are returned: whoever reads `out` applies them. None where they are applied."""
        ...


class OfHalves:
    """A linear layer that wants its inputs in 16 bits."""

    __slots__ = ()

    def input_dtype(self, num_rows: int) -> torch.dtype | None:
        return None

    def forward_quantized(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def unscaled(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        raise NotImplementedError

"""What every product with a weight on the GPU can do. Kept by models/layers/cuda_linear and cuda_narrow, called by models/arch."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from models.cuda_ops import Scales


class Linear(Protocol):
    """y = x W^T + b for x [T, k]; never changes."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Writes the product into `out` [T, n], whose rows may be strided, and returns it."""
        ...

    def takes_fp8(self, num_rows: int) -> bool:
        """Whether so many rows are best given as float8, to one of the next two."""
        ...

    def of_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """The product of x [T, k] float8 times scale [T]."""
        ...

    def unscaled_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        """As of_fp8, but for the scales, which are returned: whoever reads `out` applies them. None where they are applied."""
        ...


class OfHalves:
    """A linear layer that wants its inputs in 16 bits."""

    __slots__ = ()

    def takes_fp8(self, num_rows: int) -> bool:
        return False

    def of_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError

    def unscaled_fp8(self, x: Tensor, scale: Tensor, out: Tensor) -> Scales | None:
        raise NotImplementedError

"""The norms of a decoder: RMS norm and layer norm behind one call. Built by models/cpu/decoder; tokens are independent, so a
token's result does not depend on the rest of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cpu import ops


class Norm:
    """Norm over the last dim of x [T, H] float32, with weight [H] (and, for layer norms, a bias or none)."""

    __slots__ = ("bias", "eps", "is_rms", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.is_rms = is_rms

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The norm of every token, written to `out` (which may be x) if given."""
        if self.is_rms:
            return ops.rms_norm(x, self.weight, self.eps, out)
        normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        return normed if out is None else out.copy_(normed)

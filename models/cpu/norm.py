"""The norms of a decoder: RMS norm and layer norm behind one call. Built by models/arch from vectors; rows are independent,
so a token's result depends on no other token of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.cpu import ops
from trireme.models.forward import Group
from trireme.topology.mesh import Span


class Norm:
    """Norm over the last dim of x [T, H] float32, with weight [H] (and, for layer norms, a bias or none)."""

    __slots__ = ("bias", "eps", "is_rms", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.is_rms = is_rms

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The norm of every row, into `out` (which may be x) when given."""
        if self.is_rms:
            return ops.rms_norm(x, self.weight, self.eps, out)
        normed = torch.nn.functional.layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)
        return normed if out is None else out.copy_(normed)


def whole_columns(part: Tensor, spans: list[Span], group: Group) -> Tensor:
    """All columns in order, once each, from those of every rank, some of which ranks may share."""
    sizes = [span.size for span in spans]
    columns, have = [], 0
    for span, piece in zip(spans, group.all_gather(part.contiguous(), sizes).split(sizes, dim=1), strict=True):
        columns.append(piece[:, max(have - span.start, 0) :])
        have = max(have, span.stop)
    return torch.cat(columns, dim=1)


def norm_each_head(x: Tensor, weight: Tensor, eps: float) -> None:
    """Layer norm of x [T, heads, D] over D in place, each head with its own weights: weight [heads * D]."""
    x.copy_(torch.nn.functional.layer_norm(x, (x.shape[-1],), None, None, eps) * weight.view(x.shape[1:]))

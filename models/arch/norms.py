"""Norms that both backends compute in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from trireme.models.forward import Group
from trireme.topology.mesh import Span


def whole_columns(part: Tensor, spans: list[Span], group: Group) -> Tensor:
    """All-gathers columns in order and drops duplicates where the spans of ranks overlap."""
    sizes = [span.size for span in spans]
    columns, have = [], 0
    for span, piece in zip(spans, group.all_gather(part.contiguous(), sizes).split(sizes, dim=1), strict=True):
        columns.append(piece[:, max(have - span.start, 0) :])
        have = max(have, span.stop)
    return torch.cat(columns, dim=1)


def norm_each_head(x: Tensor, weight: Tensor, eps: float) -> None:
    """Layer norm of x [T, heads, D] over D in place, each head with its own weights: weight [heads * D]."""
    x.copy_(torch.nn.functional.layer_norm(x, (x.shape[-1],), None, None, eps) * weight.view(x.shape[1:]))

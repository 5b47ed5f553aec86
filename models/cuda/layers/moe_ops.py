"""The CUDA kernels of mixtures of experts (csrc/cuda/moe/moe.cu) as functions of tensors. Called by models/cuda/layers/moe.

As in models/cuda/ops nothing waits or allocates. models/cuda/reference.py has each in plain torch.

Legend: T tokens, E experts, S experts that a token chooses, P = T S pairs of a token and one of its experts, H hidden, F width of
an expert. Pair t S + s is token t with its choice s; its place is where it stands once pairs are sorted by expert.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.models.cuda.ops import _stream as stream
from trireme.models.cuda.ops import load

TILE_ROWS = (16, 64, 128)  # places of a tile


class ExpertActivation(NamedTuple):
    """What an expert does between its products: SwiGLU where the limit is 0, else GPT-OSS's clamped one."""

    limit: float = 0.0
    alpha: float = 0.0


class Sorted(NamedTuple):
    """Pairs by expert: `pairs` [P] int32 has the pair at each place; `tiles` [1 + 3 * most] int32 how many tiles there are, then of
    each its expert, first place and number of places, `rows` at most."""

    pairs: Tensor
    tiles: Tensor
    rows: int

    @property
    def most_tiles(self) -> int:
        return self.tiles.numel() // 3


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """The places of a tile, by how many pairs an expert has on average."""
    share = num_pairs / num_experts
    return next((rows for rows in TILE_ROWS if share <= rows), TILE_ROWS[-1])


def room_for_pairs(num_pairs: int, num_experts: int, like: Tensor) -> Sorted:
    """For so many pairs, however they fall, on the device of `like`, int32."""
    rows = tile_rows(num_pairs, num_experts)
    most = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    return Sorted(like.new_empty(num_pairs), like.new_empty(1 + 3 * most), rows)


def route_experts(logits: Tensor, chosen: Tensor, scores: Tensor) -> None:
    """chosen [T, S] int32 are the experts of the largest logits [T, E], the largest first, of equals the one with the lower number;
    scores [T, S] float32 the softmax over those. E up to 256, S up to 32."""
    load().route_experts(logits, chosen, scores, stream())


def sort_pairs(chosen: Tensor, out: Sorted, num_experts: int) -> None:
    """Sorts the pairs of chosen [T, S] by expert into `out`; those of an expert are in any order."""
    load().sort_pairs(chosen, out.pairs, out.tiles, num_experts, out.rows, stream())


def expert_gates(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    order: Sorted,
    top_k: int,
    gate: ExpertActivation,
    bias: Tensor | None = None,
) -> Tensor:
    """out [P, F] by place: act(gates, ups) of x [T, H] times weight [E, 2 F, H] of the place's expert, plus bias [E, 2 F]: F gates,
    then F ups. Sums and the activation are float32. 8 divides H and F."""
    return _product(True, x, weight, out, order, top_k, gate, bias)


def expert_outputs(x: Tensor, weight: Tensor, out: Tensor, order: Sorted, bias: Tensor | None = None) -> Tensor:
    """out [P, H] by pair: x [P, F] by place times weight [E, H, F] of the place's expert, plus bias [E, H]."""
    return _product(False, x, weight, out, order, 1, ExpertActivation(), bias)


def _product(
    is_gated: bool,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    order: Sorted,
    top_k: int,
    gate: ExpertActivation,
    bias: Tensor | None,
) -> Tensor:
    load().expert_product(
        is_gated, x, weight, out, order.pairs, order.tiles, order.rows, top_k, gate.limit, gate.alpha, bias, stream()
    )
    return out


def mix_experts(results: Tensor, scores: Tensor, out: Tensor) -> Tensor:
    """out [T, H] = the sum of results [T, S, H] times scores [T, S], in float32 and rounded once. 8 divides H."""
    load().mix_experts(results, scores, out, stream())
    return out

"""Attention of a step's prompts on a GPU: runs each part of the plan with the kernel chosen for it.

Called by models.cuda.decoder for every layer; models.cuda.attention.registry makes the choice. Only launches kernels.

Legend: T tokens of prompts, P pieces, F packed prompts, Hq query heads, Hk KV heads, D head dim, B squares of S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trireme.models.cuda.attention.prefill_plan import PromptPlan, Rules, Whole, usual_squares
from trireme.models.cuda.ops import CudaPagedKV


@dataclass(slots=True)
class Prompts:
    """A plan and its columns on the device. Token indices count from the first prompt token of the step."""

    plan: PromptPlan
    table: Tensor  # [sequences, blocks] int32
    places: Tensor  # [P] int32, index of each piece's sequence in the table
    firsts: Tensor  # [P] int32
    bounds: Tensor  # [P + 1] int32
    contexts: Tensor  # [P] int32
    fresh_start: Tensor  # [F + 1] int32
    most_queries: int = 0  # upper bound of bounds[-1], for a graph captured for larger steps; 0: the plan's own
    gathered: Gathered | None = None  # cached by kernels that gather

    @classmethod
    def of(cls, plan: PromptPlan, table: Tensor, columns: Iterable[Tensor], *, most_queries: int = 0) -> Prompts:
        """From the plan's columns on the device, with piece_row already mapped to indices of the table."""
        places, firsts, bounds, contexts, fresh_start = columns
        return cls(plan, table, places, firsts, bounds, contexts, fresh_start, most_queries)


@dataclass(slots=True)
class Gathered:
    """Locations of the queries of all pieces, and of the context tokens they attend to in the cache."""

    tokens: Tensor  # [Q] int64
    block: Tensor  # [C] int64
    offset: Tensor  # [C] int64
    context_start: Tensor  # [P + 1] int32


RunWhole: TypeAlias = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [B, Hq, S, D], k [B, Hk, S, D], v, scale) -> [B, Hq, S, D], stored with the heads of a token contiguous."""
RunFresh: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, int], Tensor]
"""(q [T, Hq, D], k [T, Hk, D], v, start [F + 1], longest, scale, window) -> [T, Hq, D]."""
RunPieces: TypeAlias = Callable[..., Any]
"""(qkv, Hq, cache, prompts, scale, window, out [T, Hq * D]): writes the pieces' tokens of out. Kernels that support them also
take `softcap` and `sinks` [Hq] float32."""


class PromptAttention:
    """One kernel per attention path, and the rules that plans for them follow."""

    def __init__(
        self,
        rules: Rules,
        pieces: RunPieces,
        *,
        whole: RunWhole | None = None,
        fresh: RunFresh | None = None,
        softcap: float = 0.0,
    ) -> None:
        """With a `softcap` of scores, pieces must be the only path."""
        assert not softcap or not (whole or fresh)
        self.rules = rules
        self._softcap = {"softcap": softcap} if softcap else {}
        self._whole, self._fresh, self._pieces = whole, fresh, pieces

    def __call__(
        self,
        qkv: Tensor,
        q_heads: int,
        cache: CudaPagedKV,
        prompts: Prompts,
        scale: float,
        window: int,
        out: Tensor,
        *,
        may_move: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of rotated qkv [T, (Hq + 2 Hk) * D] into out [T, Hq * D]; returns out, or with `may_move` possibly another
        tensor. `sinks` are supported by pieces only: models with sinks have no other path."""
        plan = prompts.plan
        assert sinks is None or not (plan.whole or plan.longest_fresh)
        for whole in plan.whole:
            found = self._square(qkv, q_heads, cache.k.shape[1], whole, scale)
            if may_move and found.shape[0] == qkv.shape[0]:
                return found
            out[whole.first : whole.first + found.shape[0]].copy_(found)
        if plan.longest_fresh:
            assert self._fresh is not None
            stop = plan.fresh_first + int(plan.fresh_start[-1])
            heads = qkv[plan.fresh_first : stop].unflatten(1, (-1, cache.k.shape[3]))
            q, k, v = heads.split([q_heads, cache.k.shape[1], cache.k.shape[1]], 1)
            found = self._fresh(q, k, v, prompts.fresh_start, plan.longest_fresh, scale, window)
            out[plan.fresh_first : stop].copy_(found.flatten(1))
        if plan.piece_row.size:
            more = self._softcap if sinks is None else {**self._softcap, "sinks": sinks}
            self._pieces(qkv, q_heads, cache, prompts, scale, window, out, **more)
        return out

    def prepare(self, qkv: Tensor, q_heads: int, kv_heads: int, scale: float) -> None:
        """Warms up the usual square shapes over arbitrary `qkv` [most tokens, (Hq + 2 Hk) * D]: some libraries plan each new
        shape for 50 ms. Call from the thread that will launch, since plans are cached per thread."""
        for whole in usual_squares(self.rules, qkv.shape[0]):
            self._square(qkv, q_heads, kv_heads, whole, scale)

    def _square(self, qkv: Tensor, q_heads: int, kv_heads: int, whole: Whole, scale: float) -> Tensor:
        assert self._whole is not None
        width = qkv.stride(0)
        dim = qkv.shape[1] // (q_heads + 2 * kv_heads)
        start = qkv.storage_offset() + whole.first * width
        strides = (whole.length * width, dim, width, 1)
        heads = ((0, q_heads), (q_heads, kv_heads), (q_heads + kv_heads, kv_heads))
        q, k, v = (
            qkv.as_strided((whole.num, num, whole.length, dim), strides, start + before * dim) for before, num in heads
        )
        found = self._whole(q, k, v, scale)
        return found.transpose(1, 2).reshape(whole.num * whole.length, q_heads * dim)


def gather(prompts: Prompts, block_size: int) -> Gathered:
    """Gather indices for kernels that cannot read the paged cache. Cached in `prompts` for the other layers."""
    if prompts.gathered is None:
        plan, device = prompts.plan, prompts.table.device
        counts = prompts.bounds.diff().long()
        shift = (prompts.firsts - prompts.bounds[:-1]).long()
        total, reach = plan.num_queries, int(plan.piece_context.sum())
        tokens = torch.repeat_interleave(shift, counts, output_size=total) + torch.arange(total, device=device)
        contexts = prompts.contexts.long()
        start = torch.nn.functional.pad(contexts.cumsum(0), (1, 0))
        owner = torch.repeat_interleave(prompts.places.long(), contexts, output_size=reach)
        position = torch.arange(reach, device=device) - torch.repeat_interleave(start[:-1], contexts, output_size=reach)
        block = prompts.table[owner, position // block_size].long()
        prompts.gathered = Gathered(tokens, block, position % block_size, start.int())
    return prompts.gathered

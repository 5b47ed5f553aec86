"""A router and its experts on the GPU, 16-bit weights, one tensor per grouped GEMM. Built by models/cuda/layer_weights.

Called like a linear layer. Nothing synchronizes and all sizes follow from the number of tokens, so it can be captured in a
CUDA graph. Tensor-parallel ranks hold a column shard of every expert and sum their results.

Legend: T tokens, E experts, S experts per token, H hidden, F width of an expert (on this rank).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trireme.machine.memory_budget import GPU_EXPERT_TOKENS as TOKENS
from trireme.models.cuda.layers import moe_ops as ops
from trireme.models.cuda.layers.protocol import LinearLayer, OfHalves


class ExpertWeights(NamedTuple):
    """gate_up [E, 2 F, H], gates first; down [E, H, F]; biases [E, 2 F] and [E, H], or None."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in self if tensor is not None)


class CudaExperts(OfHalves):
    """out [T, H] = sum over a token's S experts of softmax(their logits) times their outputs."""

    __slots__ = ("_gate", "_router", "_top_k", "_weights")

    def __init__(self, router: LinearLayer, weights: ExpertWeights, top_k: int, gate: ops.ExpertActivation) -> None:
        self._router, self._weights, self._top_k, self._gate = router, weights, top_k, gate

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """`out` may be x."""
        for start in range(0, x.shape[0], TOKENS):
            self._mix(x[start : start + TOKENS], out[start : start + TOKENS])
        return out

    def _mix(self, x: Tensor, out: Tensor) -> None:
        gate_up, down, gate_up_bias, down_bias = self._weights
        tokens, (experts, hidden, ffn), top_k = x.shape[0], down.shape, self._top_k
        logits = self._router(x, x.new_empty(tokens, experts))
        chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=x.device)
        scores = torch.empty(tokens, top_k, dtype=torch.float32, device=x.device)
        ops.route_experts(logits, chosen, scores)
        order = ops.room_for_pairs(tokens * top_k, experts, chosen)
        ops.sort_pairs(chosen, order, experts)
        wide = ops.expert_gates(x, gate_up, x.new_empty(tokens * top_k, ffn), order, top_k, self._gate, gate_up_bias)
        results = ops.expert_outputs(wide, down, x.new_empty(tokens * top_k, hidden), order, down_bias)
        ops.mix_experts(results.view(tokens, top_k, hidden), scores, out)

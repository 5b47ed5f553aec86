"""Every attention kernel for prompts that is here, and plans that mix them, against attention in float64. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from trireme.models.cuda.attention.prefill import PromptAttention, Prompts
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules, order_prompts, plan_prompts
from trireme.models.cuda.attention.registry import KERNELS, Kernel, Need, candidates, choose_on_gpu
from trireme.models.cuda.ops import CudaPagedKV
from trireme.models.cuda.reference import piece_attention_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
COUNTS, COMPUTED = [2, 300, 300, 70, 1100, 33, 64, 5], [700, 0, 0, 0, 0, 16, 0, 90]
WAYS = {"pieces": PIECES, "fresh": Rules(packs_fresh=True), "whole": Rules(whole_from=300)}


class Case:
    """Prompts of many lengths, some behind a past, after rotation: a step's own keys are in the cache already."""

    def __init__(
        self,
        heads: tuple[int, int],
        dim: int,
        dtype: torch.dtype,
        block_size: int = 16,
        *,
        counts: Sequence[int] = COUNTS,
        computed: Sequence[int] = COMPUTED,
    ) -> None:
        torch.manual_seed(0)
        new, past = (torch.tensor(x, dtype=torch.int32).numpy() for x in (counts, computed))
        order = order_prompts(new, past)
        self.heads, self.dim, self.counts, self.computed = heads, dim, new[order], past[order]
        self._fill(dtype, block_size)

    def _fill(self, dtype: torch.dtype, block_size: int) -> None:
        heads, dim, counts, computed = self.heads, self.dim, self.counts, self.computed
        self.qkv = torch.randn(int(counts.sum()), (heads[0] + 2 * heads[1]) * dim, device="cuda").to(dtype)
        width = int(-(-(counts + computed).max() // block_size)) + 1
        self.table = torch.randperm(counts.size * width, device="cuda").view(-1, width).int()
        shape = (counts.size * width, heads[1], block_size, dim)
        self.cache = CudaPagedKV(*(torch.randn(shape, device="cuda").to(dtype) for _ in range(2)))
        row = torch.repeat_interleave(torch.arange(counts.size), torch.from_numpy(counts).long()).cuda()
        start = torch.from_numpy(counts.cumsum() - counts).cuda()
        at = torch.arange(len(row), device="cuda") - start[row] + torch.from_numpy(computed).cuda()[row]
        block = self.table[row, at // block_size].long()
        k, v = self.qkv.unflatten(1, (-1, dim))[:, heads[0] :].split(heads[1], 1)
        self.cache.k[block, :, at % block_size], self.cache.v[block, :, at % block_size] = k, v

    def run(self, attention: Any, rules: Rules, window: int) -> Tensor:
        plan = plan_prompts(self.counts, self.computed, rules)
        prompts = Prompts.of(plan, self.table, (torch.from_numpy(column).cuda() for column in plan.columns))
        out = torch.full((len(self.qkv), self.heads[0] * self.dim), float("nan"), device="cuda", dtype=self.qkv.dtype)
        found = attention(self.qkv, self.heads[0], self.cache, prompts, self.dim**-0.5, window, out)
        return out if found is None else found


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    "kernel", [kernel for kernel in KERNELS if kernel.path in WAYS], ids=lambda kernel: kernel.name
)
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("heads", "dim"), [((8, 2), 128), ((3, 3), 64), ((16, 1), 256)])
def test_a_kernel_gives_attention(kernel: Kernel, window: int, heads: tuple[int, int], dim: int) -> None:
    missing = kernel.lacks(Need(torch.bfloat16, dim, window))
    if missing or (window and kernel.path == "whole"):
        pytest.skip(missing or "squares have no windows")
    rules = WAYS[kernel.path]
    case, run = Case(heads, dim, torch.bfloat16), kernel.load()
    ways: dict[str, Any] = {kernel.path: run} if kernel.path != "pieces" else {}
    pieces = run if kernel.path == "pieces" else piece_attention_reference
    found = case.run(PromptAttention(rules, pieces, **ways), rules, window)
    expected = case.run(piece_attention_reference, PIECES, window)
    assert error(found, expected) < 6e-3


@pytest.mark.parametrize("window", [0, 50, 3000])
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (7, 1), (32, 8)])
def test_few_queries_behind_a_long_context_are_split(heads: tuple[int, int], window: int) -> None:
    """Few tiles see many keys, so that programs share the keys of each; heads of any group share tiles."""
    case = Case(heads, 128, torch.bfloat16, counts=[3, 40, 2], computed=[5000, 1111, 0])
    kernel = next(kernel for kernel in KERNELS if kernel.name == "Triton")
    if missing := kernel.lacks(Need(torch.bfloat16, 128, window)):
        pytest.skip(missing)
    found, expected = (case.run(run, PIECES, window) for run in (kernel.load(), piece_attention_reference))
    assert error(found, expected) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 600])
def test_what_is_chosen_gives_attention(dtype: torch.dtype, window: int) -> None:
    chosen = choose_on_gpu(Need(dtype, 128, window), 8, 2)
    for rules in {chosen.rules, PIECES}:
        case = Case((8, 2), 128, dtype)
        expected = case.run(piece_attention_reference, PIECES, window)
        assert error(case.run(chosen.attention(), rules, window), expected) < 6e-3


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dim", [128, 256])
def test_scores_have_a_soft_cap(window: int, dim: int) -> None:
    chosen, case = (
        choose_on_gpu(Need(torch.bfloat16, dim, window, softcap=True), 8, 2),
        Case((8, 2), dim, torch.bfloat16),
    )
    found = case.run(chosen.attention(1.0), chosen.rules, window)
    assert error(found, case.run(partial(piece_attention_reference, softcap=1.0), PIECES, window)) < 6e-3
    assert error(found, case.run(piece_attention_reference, PIECES, window)) > 0.05


@pytest.mark.parametrize("kernel", candidates("pieces", Need(torch.bfloat16, 64))[0], ids=lambda kernel: kernel.name)
def test_pieces_read_an_fp8_cache_and_any_block_size(kernel: Kernel) -> None:
    case = Case((4, 2), 64, torch.bfloat16, block_size=32)
    cache = case.cache
    case.cache = CudaPagedKV(*((x.float() / 0.5).to(torch.float8_e4m3fn) for x in (cache.k, cache.v)), 0.5, 0.5)
    expected = case.run(piece_attention_reference, PIECES, 0)
    assert error(case.run(kernel.load(), PIECES, 0), expected) < 6e-3

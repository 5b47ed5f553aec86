"""Plans of prompts cover every query once, and the parts of a plan together are attention over whole contexts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.models.cuda.attention.prefill import PromptAttention, Prompts, gather
from trireme.models.cuda.attention.prefill_plan import (
    PIECES,
    PromptPlan,
    Rules,
    Whole,
    order_prompts,
    plan_prompts,
    square_of,
    usual_squares,
)
from trireme.models.cuda.attention.registry import (
    KERNELS,
    LENGTHS,
    UNTRIED,
    Kernel,
    KernelTiming,
    Need,
    candidates,
    choose,
)
from trireme.models.cuda.ops import CudaPagedKV
from trireme.models.cuda.reference import piece_attention_reference

RULES = [
    PIECES,
    Rules(packs_fresh=True),
    Rules(whole_from=5),
    Rules(whole_from=3, whole_to=20, packs_fresh=True),
]
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def random_prompts(seed: int) -> tuple[Any, Any]:
    """(counts, computed) in a plan's order."""
    rng = random.Random(seed)
    size = rng.randrange(1, 9)
    counts = np.array([rng.choice([2, 3, 8, 8, 8, 11, 17, 40]) for _ in range(size)], np.int32)
    computed = np.array([rng.choice([0, 0, 0, 1, 9]) for _ in range(size)], np.int32)
    order = order_prompts(counts, computed)
    return counts[order], computed[order]


def covered(plan: PromptPlan, num_tokens: int) -> np.ndarray[Any, Any]:
    found = np.zeros(num_tokens, np.int64)
    for whole in plan.whole:
        found[whole.first : whole.first + whole.num * whole.length] += 1
    found[plan.fresh_first : plan.fresh_first + int(plan.fresh_start[-1])] += 1
    for first, size in zip(plan.piece_first, np.diff(plan.piece_bounds), strict=True):
        found[first : first + size] += 1
    return found


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(12))
def test_every_query_is_in_one_part(rules: Rules, seed: int) -> None:
    counts, computed = random_prompts(seed)
    assert (covered(plan_prompts(counts, computed, rules), int(counts.sum())) == 1).all()


def test_a_long_prompt_is_a_square_and_a_piece() -> None:
    counts = np.array([9, 1000, 1000, 1000, 1024], np.int32)
    plan = plan_prompts(counts, np.array([50, 0, 0, 0, 0], np.int32), Rules(whole_from=512, packs_fresh=True))
    assert plan.whole == (Whole(9, 1, 960), Whole(1009, 1, 960), Whole(2009, 1, 960), Whole(3009, 1, 1024))
    assert plan.piece_first.tolist() == [0, 969, 1969, 2969]
    assert plan.piece_bounds.tolist() == [0, 9, 49, 89, 129]
    assert plan.piece_context.tolist() == [59, 1000, 1000, 1000]
    assert plan.longest_fresh == 0


def test_prompts_of_a_usual_length_go_together_by_powers_of_two() -> None:
    counts = np.full(7, 1024, np.int32)
    plan = plan_prompts(counts, 0 * counts, Rules(whole_from=512))
    assert [(whole.first, whole.num) for whole in plan.whole] == [(0, 4), (4096, 2), (6144, 1)]
    assert plan.num_queries == 0


def test_the_order_is_the_same_under_all_rules_and_keeps_equal_lengths_together() -> None:
    counts, computed = np.array([5, 30, 8, 30, 2], np.int32), np.array([0, 0, 7, 0, 0], np.int32)
    assert order_prompts(counts, computed).tolist() == [2, 1, 3, 0, 4]


def test_prompts_longer_than_a_window_are_pieces() -> None:
    counts = np.array([50, 20, 7], np.int32)
    plan = plan_prompts(counts, 0 * counts, Rules(whole_from=10, whole_to=30, packs_fresh=True))
    assert plan.whole == (Whole(50, 1, 20),)
    assert (plan.piece_first.tolist(), plan.num_queries) == ([0], 50)
    assert (plan.fresh_first, plan.fresh_start.tolist()) == (70, [0, 7])


def test_usual_squares_fill_a_step() -> None:
    assert usual_squares(Rules(whole_from=1000), 4096) == [
        *(Whole(0, num, 1024) for num in (1, 2, 4)),
        *(Whole(0, num, 2048) for num in (1, 2)),
        Whole(0, 1, 4096),
    ]
    assert [whole.length for whole in usual_squares(Rules(1024, whole_to=1024), 1 << 16)] == [1024] * 5
    assert usual_squares(PIECES, 4096) == []


def test_prepared_are_the_shapes_that_plans_ask_for() -> None:
    shapes = []

    def seen(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        shapes.append((q.shape, k.shape, q.stride(), v.stride()))
        return whole(q, k, v, scale)

    rules, qkv = Rules(whole_from=8), torch.randn(40, (HEADS + 2 * KV_HEADS) * DIM)
    attention = PromptAttention(rules, piece_attention_reference, whole=seen)
    attention.prepare(qkv[:32], HEADS, KV_HEADS, 0.3)
    prepared = set(shapes)
    counts = np.array([16, 8, 8, 8], np.int32)
    plan = plan_prompts(counts, 0 * counts, rules)
    cache = CudaPagedKV(torch.empty(1, KV_HEADS, BLOCK, DIM), torch.empty(1, KV_HEADS, BLOCK, DIM))
    prompts = Prompts.of(plan, torch.zeros(4, 1).int(), map(torch.from_numpy, plan.columns))
    shapes.clear()
    attention(qkv, HEADS, cache, prompts, 0.3, 0, torch.empty(40, HEADS * DIM))
    assert len(shapes) == 3
    assert set(shapes) <= prepared


def test_squares_have_eight_lengths_to_an_octave() -> None:
    assert len({square_of(length) for length in range(1024, 2048)}) == 8
    assert [square_of(length) for length in (1, 7, 1023, 1024, 1151, 1152, 16384)] == [
        1,
        7,
        960,
        1024,
        1024,
        1152,
        16384,
    ]
    assert all(0.88 * length < square_of(length) <= length for length in range(8, 3000))


# ---------------------------------------------------------------- kernels, by what they mean


def whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def fresh(q: Tensor, k: Tensor, v: Tensor, start: Tensor, longest: int, scale: float, window: int) -> Tensor:
    found = torch.full_like(q, float("nan"))
    for a, b in zip(start.tolist(), start[1:].tolist(), strict=False):
        assert b - a <= longest
        found[a:b] = whole(*(x[a:b].transpose(0, 1)[None] for x in (q, k, v)), scale)[0].transpose(0, 1)
    return found


def over_copies(
    qkv: Tensor, heads: int, cache: CudaPagedKV, prompts: Prompts, scale: float, window: int, out: Tensor
) -> None:
    """Like the kernel that gathers first."""
    where = gather(prompts, cache.k.shape[2])
    k, v = (x.transpose(1, 2)[where.block, where.offset] for x in (cache.k, cache.v))
    q = qkv[where.tokens, : heads * DIM].unflatten(1, (heads, DIM))
    starts = where.context_start.tolist()
    for i, (a, b) in enumerate(zip(prompts.bounds.tolist(), prompts.bounds.tolist()[1:], strict=False)):
        keys, values = k[starts[i] : starts[i + 1]], v[starts[i] : starts[i + 1]]
        mask = torch.ones(b - a, len(keys), dtype=torch.bool).tril(len(keys) - (b - a))
        found = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q[a:b], keys, values)), mask, scale=scale, enable_gqa=True
        )
        out[where.tokens[a:b]] = found[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("pieces", [piece_attention_reference, over_copies])
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_parts_together_are_attention_over_whole_contexts(pieces: Any, rules: Rules, seed: int) -> None:
    torch.manual_seed(seed)
    counts, computed = random_prompts(seed)
    plan, tokens = plan_prompts(counts, computed, rules), int(counts.sum())
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    width = int(-(-(counts + computed).max() // BLOCK))
    table = torch.randperm(len(counts) * width).view(-1, width).int()
    cache = CudaPagedKV(*torch.randn(2, len(counts) * width, KV_HEADS, BLOCK, DIM))
    starts = np.concatenate(([0], np.cumsum(counts)))
    for row, (begin, stop) in enumerate(zip(starts, starts[1:], strict=False)):  # a step's own keys are in the cache
        for i in range(begin, stop):
            at = int(computed[row]) + i - begin
            k, v = qkv[i].view(-1, DIM)[HEADS:].split(KV_HEADS)
            cache.k[table[row, at // BLOCK], :, at % BLOCK], cache.v[table[row, at // BLOCK], :, at % BLOCK] = k, v
    prompts = Prompts.of(plan, table, map(torch.from_numpy, plan.columns))
    out = torch.full((tokens, HEADS * DIM), float("nan"))
    attention = PromptAttention(rules, pieces, whole=whole, fresh=fresh)
    found = attention(qkv, HEADS, cache, prompts, 0.3, 0, out)
    everything = plan_prompts(counts, computed, PIECES)
    all_pieces = Prompts.of(everything, table, map(torch.from_numpy, everything.columns))
    expected = torch.empty_like(out)
    piece_attention_reference(qkv, HEADS, cache, all_pieces, 0.3, 0, expected)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- the choice


def timing(name: str, *us: float) -> KernelTiming:
    return KernelTiming(next(kernel for kernel in KERNELS if kernel.name == name), us)


COPIES = timing("torch flash over copies", 90, 90, 90, 90)


def test_the_fastest_of_each_way_is_chosen_and_says_why() -> None:
    cudnn = timing("cuDNN", UNTRIED, UNTRIED, 10, 20)
    chosen = choose(
        Need(torch.bfloat16, 128),
        [timing("torch flash", 5, 8, 20, 60), cudnn, COPIES, timing("Triton", 9, 10, 18, 50)],
        ["FlashInfer: not installed"],
    )
    assert chosen.rules == Rules(1024, packs_fresh=True)
    assert chosen.pieces.kernel.name == "Triton"
    assert chosen.fits_graphs
    what, value, because = chosen.decisions()[1]
    assert (what, value) == ("attention of prompts", "from 1024 tokens cuDNN, new prompts torch flash, others Triton")
    assert "cuDNN - - 10 20" in because
    assert chosen.decisions()[-1][2] == "FlashInfer: not installed"


def test_squares_are_taken_from_where_they_win_for_good() -> None:
    others = [COPIES, timing("torch flash", 5, 8, 20, 60)]
    for us, expected in (((30, 20), 4096), ((10, 70), 0), ((30, 70), 0)):
        chosen = choose(Need(torch.bfloat16, 128), [*others, timing("cuDNN", UNTRIED, UNTRIED, *us)])
        assert chosen.rules.whole_from == expected
        assert (chosen.whole is None) == (expected == 0)


def test_one_kernel_of_pieces_is_enough() -> None:
    chosen = choose(Need(torch.float16, 64, window=100), [COPIES])
    assert chosen.rules == Rules(0, 100)
    assert not chosen.fits_graphs


@pytest.mark.parametrize(
    ("need", "way", "missing"),
    [
        (Need(torch.bfloat16, 80), "pieces", "Triton: no heads of 80"),
        (Need(torch.bfloat16, 256), "whole", "cuDNN: no heads of 256"),
        (Need(torch.bfloat16, 128, softcap=True), "fresh", "torch flash: no soft caps"),
        (Need(torch.float32, 128, sinks=True), "fresh", "torch flash: no torch.float32, sinks"),
        (Need(torch.bfloat16, 72), "decode", "own kernel: no heads of 72"),
    ],
)
def test_what_a_kernel_lacks_rules_it_out(need: Need, way: Any, missing: str) -> None:
    fit, reasons = candidates(way, need)
    assert missing in reasons
    assert missing.partition(":")[0] not in [kernel.name for kernel in fit]


def test_a_package_that_is_not_there_rules_its_kernel_out() -> None:
    kernel = Kernel("other", "fresh", lambda: None, package="no_such_package_here")
    assert kernel.lacks(Need(torch.bfloat16, 128)) == "not installed"


def test_every_kernel_is_timed_for_every_length() -> None:
    assert len(COPIES.us) == len(LENGTHS)


def test_beside_streams_only_usual_squares_are_used() -> None:
    """Libraries plan other lengths at their first use, while the streams of the step wait."""
    rules = Rules(whole_from=1024)
    counts = np.array([1800, 8192, 1024, 700], np.int32)
    plan = plan_prompts(counts, np.zeros(4, np.int32), rules.beside_streams())
    lengths = {whole.length for whole in plan.whole}
    assert lengths == {1024, 8192} <= {whole.length for whole in usual_squares(rules, 16384)}
    assert plan.num_queries == (1800 - 1024) + 700, "the rest reads the cache"
    assert {whole.length for whole in plan_prompts(counts, np.zeros(4, np.int32), rules).whole} == {1792, 8192, 1024}

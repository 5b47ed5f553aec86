"""Each CUDA kernel against its torch reference in float64 or float32, over dtypes and odd shapes. Skipped without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.models.cuda import ops, reference
from trireme.models.cuda.layers.linear import Fp8Linear
from trireme.params import RowParams
from trireme.workers.sampling.gumbel import argmax_among, noise_key
from trireme.workers.sampling.top_k_top_p import kept

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HALF = [torch.float16, torch.bfloat16]
ALL = [torch.float32, *HALF]
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """What a kernel that skips an element leaves visible."""
    return torch.full(shape, math.nan, device="cuda", dtype=dtype)


def error(found: Tensor, expected: Tensor) -> float:
    a, b = found.double(), expected.double()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 4096), (700, 576), (5, 16384), (2, 24)])
def test_rms_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight, residual = (random(n, hidden, dtype=dtype) for n in (tokens, 1, tokens))
    for offset in (0.0, 1.0):
        out, expected = poisoned(tokens, hidden, dtype=dtype), torch.empty(tokens, hidden, device="cuda")
        ops.rms_norm(x, weight[0], 1e-5, out, offset=offset)
        reference.rms_norm_reference(x, weight[0], 1e-5, expected, offset=offset)
        assert error(out, expected) < ERROR[dtype]
    again = residual.clone()
    ops.rms_norm(x, weight[0], 1e-5, out, residual=residual)
    reference.rms_norm_reference(x, weight[0], 1e-5, expected, residual=again)
    assert torch.equal(residual, again)
    assert error(out, expected) < ERROR[dtype]


@pytest.mark.parametrize("dtype", HALF)
def test_rms_norm_to_fp8(dtype: torch.dtype) -> None:
    x, weight, residual = random(33, 4096, dtype=dtype), random(4096, dtype=dtype), random(33, 4096, dtype=dtype)
    expected = torch.empty(33, 4096, device="cuda")
    reference.rms_norm_reference(x, weight, 1e-5, expected, residual=residual.clone())
    out = torch.empty(33, 4096, device="cuda", dtype=torch.float8_e4m3fn)
    scale = poisoned(33, dtype=torch.float32)
    ops.rms_norm_narrow(x, weight, 1e-5, out, scale, residual=residual)
    assert error(out.float() * scale[:, None], expected) < 0.03
    assert torch.allclose(scale, expected.abs().amax(1) / 448, rtol=1e-2)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 4544), (700, 768), (5, 16384), (2, 24)])
def test_layer_norm(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight, bias, residual = (random(n, hidden, dtype=dtype) for n in (tokens, 1, 1, tokens))
    x += 3  # a mean that the variance must not see
    for shift in (bias[0], None):
        out, expected = poisoned(tokens, hidden, dtype=dtype), torch.empty(tokens, hidden, device="cuda")
        ops.layer_norm(x, weight[0], shift, 1e-5, out)
        reference.layer_norm_reference(x, weight[0], shift, 1e-5, expected)
        assert error(out, expected) < ERROR[dtype]
    again, scales = residual.clone(), some_scales(tokens, hidden)
    ops.layer_norm(x, weight[0], bias[0], 1e-5, out, residual=residual, scales=scales)
    reference.layer_norm_reference(x, weight[0], bias[0], 1e-5, expected, residual=again, scales=scales)
    assert error(residual, again) < ERROR[dtype]
    assert error(out, expected) < ERROR[dtype]
    apart = ops.layer_norm(x, weight[0], bias[0], 1e-5, out).clone()
    assert torch.equal(ops.layer_norm(x, weight[0], bias[0], 1e-5, x), apart)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.int8])
def test_layer_norm_to_one_byte(dtype: torch.dtype, narrow: torch.dtype) -> None:
    x, weight, bias = random(33, 4544, dtype=dtype), random(4544, dtype=dtype), random(4544, dtype=dtype)
    residual, expected = random(33, 4544, dtype=dtype), torch.empty(33, 4544, device="cuda")
    reference.layer_norm_reference(x, weight, bias, 1e-5, expected, residual=residual.clone())
    out = torch.empty(33, 4544, device="cuda", dtype=narrow)
    scale = poisoned(33, dtype=torch.float32)
    ops.layer_norm_narrow(x, weight, bias, 1e-5, out, scale, residual=residual)
    assert error(out.float() * scale[:, None], expected) < 0.03
    most = 448 if narrow == torch.float8_e4m3fn else 127
    assert torch.allclose(scale, expected.abs().amax(1) / most, rtol=1e-2)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("gate", list(ops.GATES))
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (7, 18176), (300, 1536), (66000, 8)])
def test_activation(dtype: torch.dtype, gate: str, tokens: int, width: int) -> None:
    x = random(tokens, width, dtype=dtype)
    expected = torch.empty(tokens, width, device="cuda", dtype=torch.float64)
    for scales in (None, some_scales(tokens, width)):
        out = ops.activation(x, poisoned(tokens, width, dtype=dtype), gate, scales)
        assert error(out, reference.activation_reference(x, expected, gate, scales)) < ERROR[dtype]
    apart = ops.activation(x, torch.empty_like(x), gate)
    assert torch.equal(ops.activation(x, x, gate), apart)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("gate", list(ops.GATES))
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (7, 14336), (300, 1536), (66000, 8)])
def test_gated_activation(dtype: torch.dtype, gate: str, tokens: int, width: int) -> None:
    gate_up = random(tokens, 2 * width, dtype=dtype)
    out = ops.gated_activation(gate_up, poisoned(tokens, width, dtype=dtype), gate)
    expected = torch.empty(tokens, width, device="cuda", dtype=torch.float64)
    assert error(out, reference.gated_activation_reference(gate_up, expected, gate)) < ERROR[dtype]
    largest = torch.zeros(tokens, device="cuda")
    largest[0] = 1e30  # is larger, and stays
    again = ops.gated_activation(gate_up, poisoned(tokens, width, dtype=dtype), gate, largest=largest)
    assert torch.equal(again, out)
    assert torch.equal(largest[1:], out[1:].float().abs().amax(-1))
    assert largest[0] == 1e30


def some_scales(tokens: int, width: int) -> ops.Scales:
    return ops.Scales(torch.rand(tokens, device="cuda") + 0.1, torch.rand(width, device="cuda") * 0.01 + 0.001)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (33, 4096), (700, 576)])
def test_a_norm_applies_the_scales_of_a_product(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, weight, residual = (random(n, hidden, dtype=dtype) for n in (tokens, 1, tokens))
    scales = some_scales(tokens, hidden)
    expected, again = torch.empty(tokens, hidden, device="cuda"), residual.clone()
    reference.rms_norm_reference(x, weight[0], 1e-5, expected, residual=again, scales=scales)
    out, summed = poisoned(tokens, hidden, dtype=dtype), residual.clone()
    ops.rms_norm(x, weight[0], 1e-5, out, residual=summed, scales=scales)
    assert error(out, expected) < ERROR[dtype]
    assert error(summed, again) < ERROR[dtype]
    narrow = torch.empty(tokens, hidden, device="cuda", dtype=torch.float8_e4m3fn)
    scale = poisoned(tokens, dtype=torch.float32)
    ops.rms_norm_narrow(x, weight[0], 1e-5, narrow, scale, residual=residual, scales=scales)
    assert torch.equal(residual, summed)
    assert error(narrow.float() * scale[:, None], expected) < 0.03
    reference.rms_norm_reference(x, weight[0], 1e-5, expected, scales=scales)
    assert error(ops.rms_norm(x, weight[0], 1e-5, x, scales=scales), expected) < ERROR[dtype]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (33, 14336), (600, 1536)])
def test_a_gate_applies_the_scales_of_a_product(dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up, scales = random(tokens, 2 * width, dtype=dtype) * 100, some_scales(tokens, 2 * width)
    expected = torch.empty(tokens, width, device="cuda", dtype=torch.float64)
    reference.gated_activation_reference(gate_up, expected, "silu", scales)
    out = ops.gated_activation(gate_up, poisoned(tokens, width, dtype=dtype), "silu", scales)
    assert error(out, expected) < ERROR[dtype]


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], device="cuda", dtype=torch.float64)
    return reference.skinny_linear_reference(x, weight, out, bias, scale=scale)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (100, 576), (4096, 4096), (33, 14336), (576, 1536), (1, 128)])
def test_skinny_linear(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = (random(n, k) / k**0.5).to(dtype), random(n, dtype=dtype)
    for rows in (1, 2, 3, 5, 8, 9, 13, 16, 17, 25, 32):
        x = random(rows, k + 64, dtype=dtype)[:, :k]  # strided
        out = ops.skinny_linear(x, weight, poisoned(rows, n, dtype=dtype), bias)
        assert error(out, exact_product(x, weight, bias)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "k"), [(16, 64), (100, 576), (4096, 4096), (33, 14336), (1, 128)])
def test_skinny_linear_of_fp8(dtype: torch.dtype, n: int, k: int) -> None:
    every = torch.arange(
        256, device="cuda", dtype=torch.uint8
    )  # all of e4m3, subnormal and negative ones, but its two NaN
    every = every[(every & 127) != 127].view(torch.float8_e4m3fn)
    weight = random(n, k).to(torch.float8_e4m3fn)
    weight.view(torch.uint8).view(-1)[: min(every.numel(), n * k)] = every.view(torch.uint8)[: n * k]
    bias = random(n, dtype=dtype)
    for scale in (torch.rand(n, device="cuda") + 0.5, torch.full((1,), 0.02, device="cuda")):
        for rows in (1, 3, 8, 9, 16, 17, 32):
            x = random(rows, k + 64, dtype=dtype)[:, :k] * 0.1
            out = ops.skinny_linear(x, weight, poisoned(rows, n, dtype=dtype), bias, scale=scale)
            assert error(out, exact_product(x, weight, bias, scale)) < ERROR[dtype]


on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "k"), [(16, 128), (100, 640), (4096, 4096), (33, 14336), (1, 1152), (3000, 2048)])
def test_fp8_linear(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias, scale = (
        random(n, k).to(torch.float8_e4m3fn),
        random(n, dtype=dtype),
        torch.rand(n, device="cuda") + 0.5,
    )
    assert ops.fp8_linear_rows(k) == 4
    for rows in (1, 2, 3, 4):
        x = random(rows, k + 64, dtype=dtype)[:, :k] * torch.tensor([1.0, 1e-3, 30.0, 0.1], device="cuda")[:rows, None]
        x = torch.cat([x, x[:, :64]], 1).to(dtype)[:, :k]  # strided
        for given in (bias, None):
            out, expected = (poisoned(rows, n, dtype=dtype) for _ in range(2))
            ops.fp8_linear(x, weight, out, given, scale=scale)
            reference.fp8_linear_reference(x, weight, expected, given, scale=scale)
            assert error(out, expected.double()) < ERROR[dtype]


@on_hopper
def test_fp8_linear_of_extreme_rows() -> None:
    weight, one = torch.ones(32, 256, device="cuda").to(torch.float8_e4m3fn), torch.ones(32, device="cuda")
    x = torch.zeros(4, 256, device="cuda", dtype=torch.bfloat16)
    x[1, 5], x[2, 7], x[3, 9] = 1e-30, float("inf"), float("nan")
    out = ops.fp8_linear(x, weight, poisoned(4, 32, dtype=torch.bfloat16), scale=one)
    assert (out[0] == 0).all()
    assert torch.equal(out[1], x[1, 5].expand(32))
    assert not out[2:].isfinite().any()
    with pytest.raises(ValueError, match="up to 4 rows of 256 values here; got 5"):
        ops.fp8_linear(random(5, 256, dtype=torch.bfloat16), weight, random(5, 32, dtype=torch.bfloat16), scale=one)
    assert ops.fp8_linear_rows(64) == 0


def random_q4_k(n: int, k: int) -> Tensor:
    """Rows of super-blocks with every nibble, scale and minimum, and sound factors."""
    blocks = torch.randint(0, 256, (n * k // ops.Q4_K_VALUES, ops.Q4_K_BYTES), device="cuda", dtype=torch.uint8)
    blocks[:, :4] = (torch.rand(blocks.shape[0], 2, device="cuda") * 1e-3 + 1e-4).half().view(torch.uint8)
    return blocks.view(n, -1)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("n", "k"), [(16, 256), (100, 512), (4096, 4096), (33, 14336), (1, 2304)])
def test_skinny_linear_of_q4_k(dtype: torch.dtype, n: int, k: int) -> None:
    weight, bias = random_q4_k(n, k), random(n, dtype=dtype)
    for rows in (5, 8, 9, 16, 17, 32):
        x = random(rows, k + 64, dtype=dtype)[:, :k]
        out = ops.skinny_linear(x, weight, poisoned(rows, n, dtype=dtype), bias)
        assert error(out, exact_product(x, weight, bias)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 256), (7, 768), (100, 512), (33, 1024), (201, 2304), (512, 14336), (4096, 4096), (28673, 4096), (4099, 14336)],
)
def test_few_rows_meet_q4_k_as_int8(dtype: torch.dtype, n: int, k: int) -> None:
    """As exact as the sums are for x so rounded, and within the bound of that for x itself."""
    weight, bias, scale = random_q4_k(n, k), random(n, dtype=dtype), torch.rand(n, device="cuda") + 0.5
    values = reference.q4_k_values(weight).double().abs()
    for rows in range(1, ops.Q4_K_INT8_ROWS + 1):
        x = random(rows, k + 64, dtype=dtype)[:, :k]
        x[0, :256], x[-1, 40] = 0, 300
        out = ops.skinny_linear(x, weight, poisoned(rows, n, dtype=dtype), bias, scale=scale)
        rounded = exact_product(reference.int8_runs(x).double(), weight, bias, scale)
        assert error(out, rounded) < ERROR[dtype] / 2
        most = x.double().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1) / 254
        bound = most @ values.T * scale
        exact = exact_product(x, weight, bias, scale)
        assert bool(((out - exact).abs() <= bound * 1.001 + exact.abs() * ERROR[dtype]).all())
        for row in range(rows):  # the order of sums is one for any number of rows
            alone = ops.skinny_linear(x[row : row + 1], weight, poisoned(1, n, dtype=dtype), bias, scale=scale)
            assert torch.equal(alone[0], out[row])


def test_what_is_not_finite_stays_so_in_int8() -> None:
    weight = random_q4_k(40, 1024)
    for bad in (math.nan, math.inf, -math.inf):
        x = random(1, 1024, dtype=torch.bfloat16)
        assert ops.skinny_linear(x, weight, poisoned(1, 40, dtype=torch.bfloat16)).isfinite().all()
        x[0, 700] = bad
        out = ops.skinny_linear(x, weight, torch.zeros(1, 40, device="cuda", dtype=torch.bfloat16))
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (33, 4096), (700, 14336)])
def test_quantize_rows(dtype: torch.dtype, tokens: int, width: int) -> None:
    x = random(tokens, width, dtype=dtype)
    x[0, :] = 0  # no scale of zero
    out, expected = (torch.empty(tokens, width, device="cuda", dtype=torch.float8_e4m3fn) for _ in range(2))
    scale, expected_scale = (poisoned(tokens, dtype=torch.float32) for _ in range(2))
    ops.quantize_rows(x, out, scale)
    reference.quantize_rows_reference(x, expected, expected_scale)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(out.float(), expected.float())
    known = poisoned(tokens, dtype=torch.float32)
    ops.quantize_rows(x, out.zero_(), known, x.float().abs().amax(-1))
    assert torch.equal(known, expected_scale)
    assert torch.equal(out.float(), expected.float())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 32, 33, 200])
def test_fp8_linear_is_near_the_dense_one(dtype: torch.dtype, rows: int) -> None:
    weight, bias, x = random(512, 1024, dtype=dtype) * 0.03, random(512, dtype=dtype), random(rows, 1024, dtype=dtype)
    linear = Fp8Linear(*Fp8Linear.quantize(weight), bias)
    out = linear(x, poisoned(rows, 512, dtype=dtype))
    assert error(out, exact_product(x, weight, bias)) < 0.05  # e4m3 keeps 4 bits: about 0.026 each of x and the weight


def test_skinny_linear_refuses_what_it_has_not() -> None:
    x, weight, out = random(33, 64), random(16, 64), random(33, 16)
    with pytest.raises(ValueError, match="33 rows"):
        ops.skinny_linear(x.half(), weight.half(), out.half())
    with pytest.raises(ValueError, match="K 40"):
        ops.skinny_linear(x[:2, :40].half(), weight[:, :40].half().contiguous(), out[:2].half())


SHAPES = [(32, 8, 128, 16), (9, 3, 64, 16), (4, 1, 256, 32), (16, 16, 80, 4), (40, 2, 96, 1), (16, 8, 128, 16)]
CONTEXTS = [1, 17, 300, 1000, 63, 0]


class Paged:
    """Random keys and values of some rows in scattered blocks; what no context reaches is NaN."""

    def __init__(
        self, heads: int, dim: int, block_size: int, dtype: torch.dtype, contexts: Sequence[int] = CONTEXTS
    ) -> None:
        rows, self.width = len(contexts), -(-max(contexts) // block_size)
        num_blocks = rows * self.width
        values = (random(num_blocks + 1, heads, block_size, dim).to(dtype) for _ in range(2))
        scales = (0.5, 0.25) if dtype == torch.float8_e4m3fn else (1.0, 1.0)
        self.kv = ops.CudaPagedKV(*values, *scales)
        self.context = torch.tensor(contexts, device="cuda", dtype=torch.int32)
        self.table = torch.randperm(num_blocks, device="cuda").view(rows, self.width).int()
        self.table[torch.arange(self.width, device="cuda") * block_size >= self.context[:, None]] = num_blocks
        unseen = [
            (num_blocks, 0),
            *((self.table[row, n // block_size], n % block_size) for row, n in enumerate(contexts) if n % block_size),
        ]
        code, nan = (torch.uint8, 0x7F) if dtype == torch.float8_e4m3fn else (torch.int16, 0x7FFF)
        for bits in (self.kv.k.view(code), self.kv.v.view(code)):
            for block, first in unseen:
                bits[int(block), :, first:] = nan


def check_decode(
    paged: Paged, q_heads: int, dim: int, dtype: torch.dtype, splits: int, *, sharpness: float = 1.0
) -> None:
    rows, contexts = paged.table.shape[0], paged.context.tolist()
    q = random(rows, q_heads * dim + 32, dtype=dtype)
    scratch = poisoned(max(1, ops.decode_scratch(rows, q_heads, dim, splits)), dtype=torch.float32)
    sinks = random(q_heads)
    for more in ({}, {"window": 40}, {"softcap": 20.0}, {"window": 100, "softcap": 30.0, "sinks": sinks}):
        arguments: tuple[Any, ...] = (q, q_heads, paged.kv, paged.table, paged.context, sharpness * dim**-0.5)
        largest = torch.zeros(rows, device="cuda") if "window" in more else None
        out = ops.decode_attention(
            *arguments,
            poisoned(rows, q_heads * dim, dtype=dtype),
            splits=splits,
            scratch=scratch,
            largest=largest,
            **more,
        )
        assert largest is None or torch.equal(largest, out.float().abs().amax(-1))
        exact = torch.empty(rows, q_heads * dim, device="cuda")
        expected = reference.decode_attention_reference(*arguments, exact, **more)
        for row, context in enumerate(contexts):
            if context:
                assert error(out[row], expected[row]) < ERROR[dtype], (row, context, more)
            else:
                assert (out[row] == 0).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("splits", [1, 3, 8])
def test_decode_attention(
    dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int, block_size: int, splits: int
) -> None:
    check_decode(Paged(kv_heads, dim, block_size, dtype), q_heads, dim, dtype, splits)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "block_size"), [s for s in SHAPES if s[2] != 80])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_over_fp8(
    dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int, block_size: int, splits: int
) -> None:
    """The values stored are the same on both sides, so the bounds are those of 16 bits."""
    check_decode(Paged(kv_heads, dim, block_size, torch.float8_e4m3fn), q_heads, dim, dtype, splits)


EDGES = [*range(1, 19), 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 191, 193, 0]
CACHES = [torch.bfloat16, torch.float8_e4m3fn]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("splits", [1, 2])
def test_decode_attention_ends_where_contexts_do(cache: torch.dtype, dim: int, splits: int) -> None:
    check_decode(Paged(2, dim, 16, cache, EDGES), 8, dim, torch.bfloat16, splits)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("group", [1, 2, 5, 7, 8, 9, 15, 16, 17, 33])
def test_decode_attention_of_all_group_sizes(cache: torch.dtype, group: int) -> None:
    check_decode(Paged(2, 128, 16, cache, [33, 300, 1, 0]), 2 * group, 128, torch.bfloat16, 1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("splits", [2, 4, 5, 8, 16, 32])
def test_decode_attention_in_many_parts(cache: torch.dtype, splits: int) -> None:
    """Up to eight are folded by the blocks themselves; some parts are empty."""
    check_decode(Paged(2, 128, 16, cache, [1000, 17, 1, 0, 555]), 8, 128, torch.bfloat16, splits)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("rows", "q_heads", "kv_heads"), [(140, 8, 8), (300, 16, 8), (350, 9, 3), (180, 12, 6)])
def test_decode_attention_of_many_rows(cache: torch.dtype, rows: int, q_heads: int, kv_heads: int) -> None:
    """Heads of a short context share a block, those of a long one do not."""
    contexts = [(0, 512, 513, 20, 700, 100, 1)[row % 7] for row in range(rows)]
    check_decode(Paged(kv_heads, 64, 16, cache, contexts), q_heads, 64, torch.bfloat16, 1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dim", [64, 128])
def test_decode_attention_of_rising_scores(cache: torch.dtype, dim: int) -> None:
    """The largest score grows by orders of magnitude along a context, and sinks below what is far."""
    paged = Paged(2, dim, 16, cache, [1000, 640, 129])
    check_decode(paged, 8, dim, torch.bfloat16, 1, sharpness=12.0)
    check_decode(paged, 8, dim, torch.bfloat16, 4, sharpness=12.0)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("context", [1, 16, 17, 33, 256, 1000])
def test_decode_attention_sees_the_token_just_written(cache: torch.dtype, context: int) -> None:
    """Right behind the kernel that writes it, where what is older is fetched before that one has ended."""
    rows, heads, dim, block_size = 16, 8, 128, 16
    paged = Paged(heads, dim, block_size, cache, [context] * rows)
    kv, last = paged.kv, context - 1
    slots = paged.table[:, last // block_size] * block_size + last % block_size
    positions = torch.full_like(slots, last)
    table, splits = random(context, dim), 4 if context > 64 else 1
    scratch = torch.empty(max(1, ops.decode_scratch(rows, 32, dim, splits)), device="cuda")
    out = torch.empty(rows, 32 * dim, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        qkv = random(rows, (32 + 2 * heads) * dim, dtype=torch.bfloat16)
        expected = torch.empty_like(out, dtype=torch.float32)
        torch.cuda.synchronize()
        ops.rotary_and_cache(qkv, 32, kv, table, positions, slots)
        ops.decode_attention(qkv, 32, kv, paged.table, paged.context, dim**-0.5, out, splits=splits, scratch=scratch)
        reference.decode_attention_reference(qkv, 32, kv, paged.table, paged.context, dim**-0.5, expected)
        assert error(out, expected) < ERROR[torch.bfloat16]


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_cache(
    dtype: torch.dtype, q_heads: int, kv_heads: int, dim: int, block_size: int, normed: bool
) -> None:
    tokens, num_blocks = 37, 12 * max(1, 16 // block_size)
    qkv = random(tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
    same = qkv.clone()
    caches = [
        ops.CudaPagedKV(
            *(torch.zeros(num_blocks, kv_heads, block_size, dim, device="cuda", dtype=dtype) for _ in range(2))
        )
        for _ in range(2)
    ]
    slots = torch.randperm(num_blocks * block_size, device="cuda")[:tokens].int()
    slots[3] = -1
    positions = torch.randint(0, 500, (tokens,), device="cuda", dtype=torch.int32)
    norms = {"q_norm": random(dim, dtype=dtype), "k_norm": random(dim, dtype=dtype)} if normed else {}
    for rotary, rows in ((dim, 500), (dim // 2, 500), (dim, 1)):
        table = random(rows, rotary).expand(500, -1)
        ops.rotary_and_cache(qkv, q_heads, caches[0], table, positions, slots, **norms)
        reference.rotary_and_cache_reference(same, q_heads, caches[1], table, positions, slots, **norms)
        width = (q_heads + kv_heads) * dim
        assert error(qkv[:, :width], same[:, :width]) < ERROR[dtype]
        assert torch.equal(qkv[:, width:], same[:, width:])
        assert error(caches[0].k, caches[1].k) < ERROR[dtype]
        assert torch.equal(caches[0].v, caches[1].v)
        qkv.copy_(same)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_applies_the_scales_of_a_product(dtype: torch.dtype, dim: int, normed: bool) -> None:
    tokens, width = 37, (6 + 4) * dim
    qkv, scales = random(tokens, width, dtype=dtype) * 100, some_scales(tokens, width)
    same, table = qkv.clone(), random(tokens, dim)
    caches = [ops.CudaPagedKV(*(random(4, 2, 16, dim, dtype=dtype) * 0 for _ in range(2))) for _ in range(2)]
    at = torch.arange(tokens, device="cuda", dtype=torch.int32)
    norms = {"q_norm": random(dim, dtype=dtype), "k_norm": random(dim, dtype=dtype)} if normed else {}
    ops.rotary_and_cache(qkv, 6, caches[0], table, at, at, scales=scales, **norms)
    reference.rotary_and_cache_reference(same, 6, caches[1], table, at, at, scales=scales, **norms)
    for found, expected in ((qkv, same), (caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        assert error(found, expected) < ERROR[dtype]


def test_rotary_of_many_tokens() -> None:
    """One block goes through all heads of a token."""
    tokens, heads, dim = 600, 20, 128
    qkv = random(tokens, (heads + 4) * dim, dtype=torch.bfloat16)
    same, table = qkv.clone(), random(tokens, dim)
    caches = [ops.CudaPagedKV(*(random(40, 2, 16, dim, dtype=torch.bfloat16) * 0 for _ in range(2))) for _ in range(2)]
    at = torch.arange(tokens, device="cuda", dtype=torch.int32)
    ops.rotary_and_cache(qkv, heads, caches[0], table, at, at)
    reference.rotary_and_cache_reference(same, heads, caches[1], table, at, at)
    assert error(qkv, same) < 1e-2
    assert error(caches[0].k, caches[1].k) < 1e-2
    assert torch.equal(caches[0].v, caches[1].v)


@pytest.mark.parametrize("dtype", HALF)
def test_rotary_writes_an_fp8_cache(dtype: torch.dtype) -> None:
    qkv = random(20, (8 + 4) * 128, dtype=dtype)
    shape = (4, 2, 16, 128)
    kv = ops.CudaPagedKV(*(torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)), 0.5, 0.25)
    table = torch.cat((torch.ones(64, 64), torch.zeros(64, 64)), 1).cuda()  # rotates by nothing
    slots = torch.arange(20, device="cuda", dtype=torch.int32)
    ops.rotary_and_cache(qkv, 8, kv, table, slots, slots)
    stored = kv.v.float().transpose(1, 2).flatten(0, 1)[:20].flatten(1) * 0.25
    assert error(stored, qkv[:, 10 * 128 :]) < 0.04
    stored = kv.k.float().transpose(1, 2).flatten(0, 1)[:20].flatten(1) * 0.5
    assert error(stored, qkv[:, 8 * 128 : 10 * 128]) < 0.04


@pytest.mark.parametrize("dtype", ALL)
def test_gather_rows(dtype: torch.dtype) -> None:
    table, ids = random(100, 576, dtype=dtype), torch.randint(0, 150, (33,), device="cuda", dtype=torch.int32)
    out = ops.gather_rows(table, ids, poisoned(33, 576, dtype=dtype), first=30, scale=2.0)
    inside = (ids >= 30) & (ids < 130)
    assert torch.equal(out[inside], table[ids[inside].long() - 30] * 2)
    assert (out[~inside] == 0).all()


def test_copy_blocks() -> None:
    cache = random(10, 3, 16, 64, dtype=torch.bfloat16)
    expected = cache.clone()
    pairs = torch.tensor([[0, 5], [1, 7], [0, 9]], device="cuda", dtype=torch.int32)
    expected[[5, 7, 9]] = cache[[0, 1, 0]]
    ops.copy_blocks(cache, pairs)
    assert torch.equal(cache, expected)


CUTS = [
    {},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 1},
    {"top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.999},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 200, "top_p": 0.95, "min_p": 0.01},
]


def expected_token(logits: np.ndarray[Any, np.dtype[np.float32]], params: RowParams, position: int) -> int:
    """By the numpy sampler's own pieces, which define every decision."""
    best = int(logits.argmax())
    if params.is_greedy:
        return best
    peak = float(logits[best])
    cuts = (params.top_k, params.top_p, params.min_p, params.temperature)
    is_cut = 0 < params.top_k < logits.size or params.top_p < 1 or params.min_p > 0
    ids = kept(logits, peak, cuts) if is_cut else np.flatnonzero(logits > -np.inf)
    return argmax_among(ids, logits[ids], peak, params.temperature, noise_key(params.seed, params.choice, position))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("vocab", [17, 1000, 49152, 128256])
def test_sampling_draws_what_numpy_draws(dtype: torch.dtype, vocab: int) -> None:
    rows = 3 * len(CUTS) + 1
    logits = (random(rows, vocab) * 4).to(dtype)  # half types tie often
    logits[:, 3] = -math.inf
    params = [RowParams(8, seed=i * 7919, choice=i % 3, **CUTS[i % len(CUTS)]) for i in range(rows - 1)]
    params.append(RowParams(8, temperature=0.0))
    jobs = np.zeros(rows, ops.JOB)
    for job, one in zip(jobs, params, strict=True):
        job["seed"], job["choice"], job["temperature"], job["top_p"] = one.seed, one.choice, one.temperature, one.top_p
        job["min_depth"] = one.temperature * math.log(one.min_p) if one.min_p > 0 else -math.inf
        job["top_k"], job["is_greedy"] = max(one.top_k, 0), one.is_greedy
    positions = torch.arange(rows, device="cuda", dtype=torch.int32) * 11
    tokens = torch.full((rows,), -9, device="cuda", dtype=torch.int32)
    ops.sample_rows(logits, torch.from_numpy(jobs.view(np.uint8)).cuda(), positions, tokens)
    values = logits.float().cpu().numpy()
    assert tokens.tolist() == [expected_token(values[i], params[i], 11 * i) for i in range(rows)]


def test_jobs_have_one_layout_on_both_sides() -> None:
    assert ops.JOB.itemsize == ops.load().SAMPLE_JOB_BYTES


def test_sampling_tells_of_logits_that_are_not_finite() -> None:
    logits = random(4, 1000)
    logits[0, 7], logits[1, 8], logits[2] = math.nan, math.inf, -math.inf
    jobs = np.zeros(4, ops.JOB)
    jobs["is_greedy"], jobs["top_p"], jobs["temperature"], jobs["min_depth"] = 1, 1, 1, -math.inf
    tokens = torch.zeros(4, device="cuda", dtype=torch.int32)
    ops.sample_rows(logits, torch.from_numpy(jobs.view(np.uint8)).cuda(), torch.zeros_like(tokens), tokens)
    assert tokens.tolist() == [ops.NOT_FINITE] * 3 + [int(logits[3].argmax())]

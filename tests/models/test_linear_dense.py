"""Dense kinds by every path through the blocked product: panels of 192 k's, groups of rows, blocks of 96 rows, odd edges.

A sum over k in order through one accumulator per output is the contract, so numpy can say what it must be: products of two
float32 values are exact in float64, and each is rounded once, with the sum.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.test_linear import isa, make_weight, make_x
from trireme.models.cpu.packed_ops import linear, pack, unpack
from trireme.models.native import load_native

__all__ = ["isa"]
NATIVE = load_native()
DENSE_KINDS = ("F32", "F16", "BF16")
PANEL = 192
EPS = float(np.finfo(np.float32).eps)


def whole_numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Small whole numbers, of which float32 sums are exact in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32))


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("k", [1, 3, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL + 5, 577])
def test_every_number_of_rows_is_exact_on_whole_numbers(isa: str, kind: str, k: int) -> None:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    w = whole_numbers((37, k), 1)
    weight = pack(kind, w.to(dtype), 37, k)
    x = whole_numbers((101, k), 2)
    expected = x @ w.T
    for m in (*range(1, 28), 48, 95, 96, 97, 101):
        assert torch.equal(linear(x[:m], weight), expected[:m]), f"M = {m}"


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("k", [PANEL + 1, 3 * PANEL, 1000])
def test_rows_on_panels_are_those_of_one_row_alone(isa: str, kind: str, k: int) -> None:
    weight, x = make_weight(kind, 83, k), make_x(200, k)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(200)])
    for m in (2, 3, 5, 7, 8, 13, 25, 31, 97, 193, 200):
        assert torch.equal(linear(x[:m], weight), alone[:m]), f"M = {m}"


@pytest.mark.parametrize("kind", DENSE_KINDS)
def test_sums_run_over_k_in_order_with_one_rounding_each(kind: str) -> None:
    if NATIVE.best_isa() == "portable":
        pytest.skip("the portable variant rounds products too")
    k = 2 * PANEL + 7
    weight, x = make_weight(kind, 20, k), make_x(30, k)
    w = unpack(weight).numpy().astype(np.float64)
    acc = np.zeros((30, 20), np.float32)
    for i in range(k):
        # The product is exact in float64; the sum with a float32 may round twice, which the bound below allows for.
        acc = (x[:, i : i + 1].double().numpy() * w[:, i] + acc).astype(np.float32)
    result = linear(x, weight).numpy()
    assert (result == acc).mean() > 0.999
    np.testing.assert_allclose(result, acc, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("m", [2, 7, 30, 120])
@pytest.mark.parametrize("n", [1, 16, 31, 50])
def test_bias_accumulate_and_strides_after_panels(isa: str, kind: str, m: int, n: int) -> None:
    k = 2 * PANEL + 9
    weight = make_weight(kind, n, k)
    wide = make_x(m, k + 24)
    x = wide[:, 8 : 8 + k]
    bias = torch.linspace(-1, 1, n)
    plain = linear(x.contiguous(), weight)
    assert torch.equal(linear(x, weight, bias=bias), plain + bias)
    canvas = torch.full((m, n + 20), 7.0)
    linear(x, weight, bias=bias, out=canvas[:, 3 : 3 + n], accumulate=True)
    assert torch.equal(canvas[:, 3 : 3 + n], plain + bias + 7.0)
    assert bool((canvas[:, :3] == 7.0).all())
    assert bool((canvas[:, 3 + n :] == 7.0).all())


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("m", [1, 6, 12, 70])
def test_error_is_that_of_float32_sums(isa: str, kind: str, m: int) -> None:
    k = 1536
    weight, x = make_weight(kind, 33, k), make_x(m, k)
    w = unpack(weight).double()
    error = (linear(x, weight).double() - x.double() @ w.T).abs()
    assert (error <= (k + 4) * EPS * (x.double().abs() @ w.abs().T)).all()


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_every_16_bit_pattern_is_widened_exactly(isa: str, kind: str) -> None:
    """Through both loads: straight from the weight (one row) and by way of the panel (many)."""
    dtype = torch.float16 if kind == "F16" else torch.bfloat16
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = bits[torch.isfinite(bits)]
    weight = pack(kind, bits.reshape(-1, 1), bits.numel(), 1)
    for m in (1, 14):
        assert torch.equal(linear(torch.ones(m, 1), weight), bits.float().expand(m, -1))

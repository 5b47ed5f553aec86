"""Products with int8 weights and one scale for each row on either side: all of k sums in int32, so every instruction set gives
the same bits, those of a formula, and the error against float64 of unrounded x is half a step of each row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.test_linear import make_weight, make_x
from trireme.errors import ModelError
from trireme.models.cpu.packed_ops import PackedWeight, gather_rows, linear, pack, slice_cols, unpack
from trireme.models.native import load_native
from trireme.models.weights.packed import MAX_INT8_LENGTH, int8_rows

NATIVE = load_native()
SHAPES = [(1, 1), (16, 32), (17, 33), (5, 31), (33, 96), (70, 577), (100, 1536), (48, 2304)]


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads, usual = NATIVE.num_threads(), NATIVE.isa()
    NATIVE.set_num_threads(2)
    yield
    NATIVE.set_isa(usual)
    NATIVE.set_num_threads(threads)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def codes_and_scales(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * k)
    return rng.integers(-128, 128, (n, k), dtype=np.int8), rng.uniform(1e-3, 2e-2, n).astype(np.float32)


def expected(x: Tensor, codes: np.ndarray, scales: np.ndarray) -> Tensor:
    """The definition in numpy, one float32 operation after the other."""
    values = x.numpy()
    largest = np.abs(values).max(1, keepdims=True)
    q = np.rint(values * (np.float32(127) / largest)).astype(np.int64)
    sums = (q @ codes.T.astype(np.int64)).astype(np.float32)
    return torch.from_numpy(sums * (scales * (largest / np.float32(127))))


@pytest.mark.parametrize("name", NATIVE.isas())
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_set_gives_the_bits_of_the_formula(name: str, n: int, k: int) -> None:
    codes, scales = codes_and_scales(n, k)
    weight = pack("INT8", int8_rows(codes, scales), n, k)
    NATIVE.set_isa(name)
    for m in (*range(1, 26), 33, 48, 70, 97, 200):
        x = make_x(m, k)
        assert torch.equal(linear(x, weight), expected(x, codes, scales)), f"M = {m}"


@pytest.mark.parametrize("name", [name for name in NATIVE.isas() if name != "portable"])
def test_portable_gives_the_same_bits(name: str) -> None:
    """Rows that are not finite, zero or tiny included."""
    weight, x = make_weight("INT8", 37, 321), make_x(70, 321)
    x[3, 5], x[9, 0], x[12, 320] = float("nan"), float("inf"), -float("inf")
    x[20], x[21] = 0, 1e-38
    results = []
    for each in ("portable", name):
        NATIVE.set_isa(each)
        results.append(linear(x, weight, bias=torch.linspace(-1, 1, 37)))
    assert same_bits(*results)
    assert results[0].isnan().any(1).nonzero().flatten().tolist() == [3, 9, 12]


@pytest.mark.parametrize("name", NATIVE.isas())
@pytest.mark.parametrize(("n", "k"), [(70, 577), (48, 2304)])
def test_error_is_half_a_step_of_each_row(name: str, n: int, k: int) -> None:
    """|error| <= amax(x) / 254 * sum |w| against float64 on the weights as they are packed."""
    NATIVE.set_isa(name)
    weight, x = make_weight("INT8", n, k), make_x(70, k)
    w = unpack(weight).double()
    error = (linear(x, weight).double() - x.double() @ w.T).abs()
    bound = x.double().abs().amax(1, keepdim=True) / 254 * w.abs().sum(1)
    assert (error <= bound * 1.0001).all()
    assert error.max() > 1e-3 * bound.max(), "a bound that is never neared proves nothing"


@pytest.mark.parametrize("name", NATIVE.isas())
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_rows_do_not_overflow(name: str, sign: int) -> None:
    NATIVE.set_isa(name)
    k = MAX_INT8_LENGTH
    codes = np.full((2, k), -128, np.int8)
    codes[1] = 127
    weight = pack("INT8", int8_rows(codes, np.ones(2, np.float32)), 2, k)
    x = torch.full((3, k), float(sign))
    sums = torch.tensor([-128.0 * 127 * k, 127.0 * 127 * k]) * sign
    assert torch.equal(linear(x, weight), (sums * (1 / torch.tensor(127.0))).expand(3, 2))


def test_longer_rows_are_refused() -> None:
    k = MAX_INT8_LENGTH + 1
    with pytest.raises(ModelError, match="too long for int8"):
        pack("INT8", np.zeros(k + 4, np.uint8), 1, k)


@pytest.mark.parametrize(("n", "k"), [(16, 576), (70, 577)])
def test_memory_is_a_byte_for_each_weight_and_eight_for_each_row(n: int, k: int) -> None:
    weight: PackedWeight = make_weight("INT8", n, k)
    assert weight.nbytes == (n + 15) // 16 * 16 * ((k + 31) // 32 * 32 + 8)


def test_cut_columns_keep_their_scales() -> None:
    codes, scales = codes_and_scales(20, 96)
    part = pack("INT8", slice_cols("INT8", int8_rows(codes, scales), 96, slice(7, 50)), 20, 43)
    values = codes[:, 7:50].astype(np.float32) * scales[:, None]
    assert torch.equal(gather_rows(part, torch.arange(20)), torch.from_numpy(values))

"""The instruction sets' kernels against each other: for block types, bits must be equal between all vector variants that this
machine has, whatever the shape. (test_linear.py holds each of them against float64.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.models.isas import instruction_set
from tests.models.test_linear import BLOCK_KINDS, fit, make_weight, make_x
from trireme.models.cpu.packed_ops import PackedWeight, linear
from trireme.models.native import load_native

NATIVE = load_native()
ALL = ("portable", "avx2", "avxvnni", "avx512vnni", "amx")
VECTOR_SETS = [name for name in NATIVE.isas() if name != "portable"]


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    threads = NATIVE.num_threads()
    NATIVE.set_num_threads(2)
    yield
    NATIVE.set_num_threads(threads)


def run(name: str, weight: PackedWeight, x: Tensor) -> Tensor:
    with instruction_set(name):
        return linear(x, weight)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def test_sets_come_in_order_and_end_with_the_best() -> None:
    names = NATIVE.isas()
    assert names == [name for name in ALL if name in names]
    assert names[0] == "portable"
    assert names[-1] == NATIVE.best_isa()


@pytest.mark.skipif(len(VECTOR_SETS) < 2, reason="this machine has one vector set")
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 512), (33, 96), (70, 1280), (100, 2304)])
def test_variants_agree_to_the_bit(kind: str, n: int, k: int) -> None:
    """Odd and even numbers of tiles, of blocks and of rows: groups of 16 cut anywhere, panels cut short, a last tile alone."""
    k = fit(kind, k)
    weight = make_weight(kind, n, k)
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 22, 31, 32, 33, 48, 100, 200):
        x = make_x(m, k)
        if m > 3:
            x[3, 5] = float("nan")
        expected = run(VECTOR_SETS[0], weight, x)
        for name in VECTOR_SETS[1:]:
            assert same_bits(run(name, weight, x), expected), f"{name}, M = {m}"


@pytest.mark.parametrize("name", [name for name in VECTOR_SETS if name != "avx2"])
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_rows_of_a_large_batch_are_those_of_one(name: str, kind: str) -> None:
    """More rows than a task takes, on several threads: grouped rows are cut at multiples of 16."""
    k = fit(kind, 320)
    weight, x = make_weight(kind, 50, k), make_x(230, k)
    NATIVE.set_num_threads(3)
    whole = run(name, weight, x)
    alone = torch.cat([run(name, weight, x[i : i + 1]) for i in range(230)])
    assert torch.equal(whole, alone)


@pytest.mark.parametrize("name", VECTOR_SETS)
def test_portable_is_near(name: str) -> None:
    """The portable kernels round between the product and the sum, so that they differ in the last places only."""
    for kind in BLOCK_KINDS:
        k = fit(kind, 256)
        weight, x = make_weight(kind, 40, k), make_x(20, k)
        torch.testing.assert_close(run(name, weight, x), run("portable", weight, x), rtol=1e-4, atol=1e-3)

"""Packed linear layers: error bounds against float64, and the promise that a row's result is the same bits whatever the other
rows, the number of threads and the split of the weight. Every instruction set of this machine runs every test."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from tests.models.isas import instruction_set
from trireme.errors import ModelError
from trireme.models.cpu.packed_ops import (
    BLOCKS,
    PACKED_KINDS,
    PackedWeight,
    gather_rows,
    linear,
    linear_reference,
    pack,
    row_bytes,
    slice_rows,
    unpack,
)
from trireme.models.native import load_native
from trireme.models.weights.gguf_expand import dequantize
from trireme.models.weights.packed import int8_rows

NATIVE = load_native()
DENSE_KINDS = ("F32", "F16", "BF16")
BLOCK_KINDS = tuple(kind for kind in PACKED_KINDS if kind not in (*DENSE_KINDS, "INT8"))  # INT8: test_linear_int8.py
# Where the fp16 scale and, if there is one, the fp16 min of a block lie.
FP16_AT = {
    **{"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}
# Bits per value in tiles where that is not what the file has: six-bit sub-scales become bytes.
PACKED_BITS = {"Q4_K": 4.625, "Q5_K": 5.625, "Q3_K": 3.5625, "IQ4_XS": 4.3125}
ISAS = ("portable", "avx2", "avxvnni", "avx512vnni", "amx")
EPS = float(np.finfo(np.float32).eps)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    threads = NATIVE.num_threads()
    if request.param not in NATIVE.isas():
        pytest.skip(f"this machine has no {request.param}")
    NATIVE.set_num_threads(2)
    with instruction_set(request.param):
        yield request.param
    NATIVE.set_num_threads(threads)


def fit(kind: str, k: int) -> int:
    """k rounded up to whole blocks."""
    size = BLOCKS[kind][0]
    return (k + size - 1) // size * size


def make_raw(kind: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    """Random bits with sane scales: every code, sub-scale and sign occurs."""
    rng = np.random.default_rng(seed)
    if kind in DENSE_KINDS:
        weights = rng.standard_normal((n, k)).astype(np.float32)
        if kind == "F32":
            return weights.view(np.uint8)
        return quants.quantize(weights, GGMLQuantizationType[kind]).reshape(n, -1).view(np.uint8)
    if kind == "INT8":
        codes = rng.integers(-128, 128, (n, k), dtype=np.int8)
        return int8_rows(codes, rng.uniform(-0.02, 0.02, n).astype(np.float32))
    blocks = rng.integers(0, 256, (n * k // BLOCKS[kind][0], BLOCKS[kind][1]), dtype=np.uint8)
    for at in FP16_AT[kind]:
        scales = rng.uniform(-0.02, 0.02, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(n, row_bytes(kind, k))


def make_weight(kind: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    return pack(kind, make_raw(kind, n, k, seed), n, k)


def make_x(m: int, k: int, seed: int = 1) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((m, k)).astype(np.float32))


def round_activations(kind: str, x: Tensor) -> Tensor:
    """What the kernels see of x, as float64: int8 per block of 32, with INT8 per row; dense kinds see all of it."""
    if kind in DENSE_KINDS:
        return x.double()
    blocks = x.reshape(x.shape[0], -1, x.shape[1] if kind == "INT8" else 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    q = torch.round(blocks * (127.0 / amax))
    return (q.double() * (amax / 127.0).double()).reshape(x.shape)


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 96), (35, 576), (48, 1536)])
def test_pack_keeps_the_values(kind: str, n: int, k: int) -> None:
    k = fit(kind, k)
    raw = make_raw(kind, n, k)
    weight = pack(kind, raw, n, k)
    assert torch.equal(unpack(weight), torch.from_numpy(dequantize(kind, raw, n, k)))
    tiles = (n + 15) // 16
    bits = PACKED_BITS.get(kind, row_bytes(kind, k) * 8 / k)
    sums = 4 if kind == "INT8" else 0
    assert weight.nbytes == pytest.approx(tiles * 16 * (k * bits / 8 + sums)), (
        "packing must not add to the bits of the file"
    )


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 17, 32), (3, 70, 96), (5, 960, 576), (9, 33, 1536), (70, 16, 160)])
def test_arithmetic_error_is_that_of_float32_sums(isa: str, kind: str, m: int, n: int, k: int) -> None:
    """Against float64 on the values the kernels see: |error| <= (terms + 4) * eps * sum of the terms' magnitudes, a block
    giving one term for its codes and, where it has a min, one for that."""
    k = fit(kind, k)
    weight, x = make_weight(kind, n, k), make_x(m, k)
    exact = round_activations(kind, x)
    w = unpack(weight).double()
    num_sums = 1 if kind == "INT8" else k // 32 * 2 if kind in BLOCK_KINDS else k
    # Codes and mins are added separately, each part at most twice the range of the row.
    has_mins = len(FP16_AT.get(kind, ())) == 2
    magnitude = exact.abs() @ (w.abs().T + (w.abs().amax(1) * 4 if has_mins else 0))
    error = (linear(x, weight).double() - exact @ w.T).abs()
    assert (error <= (num_sums + 4) * EPS * magnitude).all()


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_activation_rounding_is_within_half_a_step(isa: str, kind: str) -> None:
    """|error| <= sum over blocks of (amax / 127 / 2) * sum |w|: the bound that docs state for int8 activations."""
    m, n, k = 7, 100, fit(kind, 576)
    weight, x = make_weight(kind, n, k), make_x(m, k)
    half_step = x.reshape(m, -1, 32).abs().amax(-1).double() / 127 / 2
    weight_sums = unpack(weight).double().abs().reshape(n, -1, 32).sum(-1)
    reference = x.double() @ unpack(weight).double().T
    error = (linear(x, weight).double() - reference).abs()
    assert (error <= half_step @ weight_sums.T * 1.001 + 1e-4).all()
    assert error.square().mean().sqrt() / reference.square().mean().sqrt() < 0.01


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_extreme_codes_do_not_overflow(isa: str, kind: str) -> None:
    """All bits of all codes and sub-scales set, or none, and activations at full scale of either sign."""
    n, k = 16, 512
    for byte in (0, 0x7F, 0x80, 0xFF):
        blocks = np.full((n * k // BLOCKS[kind][0], BLOCKS[kind][1]), byte, np.uint8)
        for at in FP16_AT[kind]:
            blocks[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = 127
        weight = pack(kind, blocks, n, k)
        for m in (1, 2, 3, 5, 21):
            x = torch.ones(m, k)
            x[1::2] *= -1
            reference = x.double() @ unpack(weight).double().T
            scale = unpack(weight).double().abs().sum(1) + 1
            assert ((linear(x, weight).double() - reference).abs() <= scale * 1e-5).all()


@pytest.mark.parametrize("kind", DENSE_KINDS)
@pytest.mark.parametrize("k", [1, 7, 33, 577])
def test_dense_kinds_take_any_k(isa: str, kind: str, k: int) -> None:
    weight, x = make_weight(kind, 19, k), make_x(6, k)
    torch.testing.assert_close(linear(x, weight), linear_reference(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_rows_do_not_depend_on_how_many_there_are(isa: str, kind: str) -> None:
    n, k = 83, fit(kind, 192)
    weight, x = make_weight(kind, n, k), make_x(70, k)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(70)])
    for m in range(1, 71):
        assert torch.equal(linear(x[:m], weight), alone[:m]), f"M = {m}"
    assert torch.equal(linear(x[13:50], weight), alone[13:50]), "offset in the batch"


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("m", [1, 2, 33, 200])
def test_rows_do_not_depend_on_threads(isa: str, kind: str, m: int) -> None:
    k = fit(kind, 128)
    weight, x = make_weight(kind, 500, k), make_x(m, k)
    results = []
    for threads in (1, 2, 3, 8):
        NATIVE.set_num_threads(threads)
        results.append(linear(x, weight))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_columns_do_not_depend_on_the_split_of_the_weight(isa: str, kind: str) -> None:
    n, k = 90, fit(kind, 320)
    raw, x = make_raw(kind, n, k), make_x(5, k)
    whole = linear(x, pack(kind, raw, n, k))
    for start, stop in ((0, 31), (31, 32), (32, 90)):
        part = pack(kind, slice_rows(kind, raw, k, slice(start, stop)), stop - start, k)
        assert torch.equal(linear(x, part), whole[:, start:stop])


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_vector_variants_agree_to_the_bit(kind: str) -> None:
    names = NATIVE.isas()[1:]
    if len(names) < 2:
        pytest.skip("needs another vector set beside AVX2")
    k = fit(kind, 576)
    weight, x = make_weight(kind, 70, k), make_x(37, k)
    for m in (1, 2, 3, 4, 7, 8, 11, 37):
        results = []
        for name in names:
            with instruction_set(name):
                results.append(linear(x[:m], weight))
        assert all(torch.equal(result, results[0]) for result in results), f"M = {m}"


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_long_rows_agree_with_short_steps(isa: str, kind: str) -> None:
    """Many rows are computed panel by panel: the sums carried from one to the next must be those of one row alone."""
    k = 1024 * 2 + 256
    weight, x = make_weight(kind, 20, k), make_x(30, k)
    alone = torch.cat([linear(x[i : i + 1], weight) for i in range(30)])
    assert torch.equal(linear(x, weight), alone)


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 31])
def test_bias_accumulate_and_strides(isa: str, kind: str, n: int) -> None:
    m, k = 6, fit(kind, 64)
    weight = make_weight(kind, n, k)
    wide = make_x(m, k + 40)
    x = wide[:, 8 : 8 + k]
    bias = torch.linspace(-1, 1, n)
    plain = linear(x.contiguous(), weight)
    assert torch.equal(linear(x, weight), plain)
    assert torch.equal(linear(x, weight, bias=bias), plain + bias)

    canvas = torch.full((m, n + 20), 7.0)
    out = canvas[:, 3 : 3 + n]
    assert linear(x, weight, bias=bias, out=out, accumulate=True) is out
    assert torch.equal(out, plain + bias + 7.0)
    out.fill_(7.0)
    assert bool((canvas == 7.0).all()), "columns outside of the result were written"
    linear(x, weight, out=out)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_values_stay_in_their_row(isa: str, kind: str, bad: float) -> None:
    """O-case of a poisoned row: neighbours in the batch must not notice, and the row itself must show it."""
    k = fit(kind, 96)
    weight, x = make_weight(kind, 40, k), make_x(9, k)
    clean = linear(x, weight)
    x[4, 50] = bad
    result = linear(x, weight)
    assert not torch.isfinite(result[4]).any()
    keep = torch.arange(9) != 4
    assert torch.equal(result[keep], clean[keep])


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_zero_tiny_and_huge_blocks(isa: str, kind: str) -> None:
    k = fit(kind, 128)
    weight, x = make_weight(kind, 24, k), make_x(4, k)
    x[0] = 0
    x[1, :32] = 1e-38
    x[1, 32:64] = 0
    x[2] *= 1e20
    result = linear(x, weight)
    assert bool((result[0] == 0).all())
    assert bool(torch.isfinite(result).all())
    reference = linear_reference(x, weight)
    spread = float(reference[2].abs().max()) / 1e20
    torch.testing.assert_close(result[2] / 1e20, reference[2] / 1e20, rtol=0.02, atol=0.02 * spread)


def test_no_rows_is_no_work() -> None:
    assert linear(torch.empty(0, 64), make_weight("Q4_1", 20, 64)).shape == (0, 20)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_gather_rows_reads_the_packed_matrix(kind: str) -> None:
    k = fit(kind, 96)
    raw = make_raw(kind, 37, k)
    weight = pack(kind, raw, 37, k)
    table = torch.from_numpy(dequantize(kind, raw, 37, k))
    for ids in ([36], [0, 36, 5, 5, 16, 15], []):
        index = torch.tensor(ids, dtype=torch.int64)
        assert torch.equal(gather_rows(weight, index), table[index])
    for ids in ([37], [3, -1]):
        with pytest.raises(IndexError, match="of a matrix of 37 rows"):
            gather_rows(weight, torch.tensor(ids))


def test_pack_from_torch_tensors() -> None:
    for dtype, kind in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.bfloat16, "BF16")):
        dense = torch.randn(20, 30).to(dtype)
        assert torch.equal(unpack(pack(kind, dense, 20, 30)), dense.float())
        assert torch.equal(unpack(pack(kind, dense.T, 30, 20)), dense.T.float())


def test_wrong_use_is_refused() -> None:
    weight = make_weight("Q4_1", 20, 64)
    x = torch.randn(3, 64)
    with pytest.raises(ValueError, match=r"x is float32 \[3, 32\] .* it must be \[any, 64\]"):
        linear(torch.randn(3, 32), weight)
    with pytest.raises(ValueError, match="needs out"):
        linear(x, weight, accumulate=True)
    with pytest.raises(ModelError, match="no kernel computes with TQ2_0"):
        pack("TQ2_0", np.zeros(66, np.uint8), 1, 256)
    with pytest.raises(ValueError, match=r"raw is uint8 \[20\] .* it must be \[40\]"):
        pack("Q4_1", np.zeros(20, np.uint8), 2, 32)


def test_packed_memory_is_given_back() -> None:
    """Weights share mappings; those without weights left must be returned to the system."""
    page_kib = 4

    def resident_kib() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * page_kib

    before = resident_kib()
    for seed in range(12):
        held = [make_weight("F32", 512, 2048, seed) for _ in range(4)]
        assert resident_kib() - before > 12_000
        del held
    assert resident_kib() - before < 100_000

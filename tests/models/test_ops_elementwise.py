"""Native norms, rotary embedding with cache write and activation against their torch references."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.models.attention_case import int32
from tests.models.isas import instruction_set
from trireme.models.cpu import ops
from trireme.models.forward import KVLayer
from trireme.models.native import load_native

native = load_native()
ALL_VARIANTS = ["portable", "avx2", "avx512vnni"]
VARIANTS = [name for name in ALL_VARIANTS if name in native.isas()]
KV_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


@pytest.mark.parametrize("width", [1, 8, 15, 16, 17, 64, 100, 576, 1023])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_rms_norm_matches_reference(isa: str, rows: int, width: int) -> None:
    x, weight = torch.randn(rows, width) * 3, torch.randn(width)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_reference(x, weight, 1e-5))
    residual, twin = torch.randn(rows, width), torch.empty(0)
    twin = residual.clone()
    got, want = ops.add_rms_norm(x, residual, weight, 1e-5), ops.add_rms_norm_reference(x, twin, weight, 1e-5)
    torch.testing.assert_close(got, want)
    assert torch.equal(residual, twin)


def test_norms_take_strided_rows_and_write_in_place(isa: str) -> None:
    wide, weight = torch.randn(5, 100), torch.randn(40)
    x = wide[:, 30:70]
    want = ops.rms_norm_reference(x, weight, 1e-6)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6, out=x), x)
    torch.testing.assert_close(x, want)


def test_norm_bits_do_not_depend_on_the_batch(isa: str) -> None:
    x, weight = torch.randn(300, 576), torch.randn(576)
    whole = ops.rms_norm(x, weight, 1e-5)
    for row in (0, 17, 299):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], whole[row])


@pytest.mark.parametrize("width", [1, 7, 16, 24, 1536])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_swiglu_matches_reference(isa: str, rows: int, width: int) -> None:
    gate_up = torch.randn(rows, 2 * width) * 4
    torch.testing.assert_close(ops.swiglu(gate_up), ops.swiglu_reference(gate_up))


def test_swiglu_at_the_ends_of_the_range(isa: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, -20.0, -0.0, 0.0, 20.0, 88.0, 200.0, 1e30, float("nan"), float("inf")]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    want = ops.swiglu_reference(gate_up)
    torch.testing.assert_close(ops.swiglu(gate_up), want, rtol=1e-5, atol=1e-6, equal_nan=True)


def make_cache(dtype: torch.dtype, heads: int, dim: int, block_size: int) -> KVLayer:
    return KVLayer(
        torch.zeros(9, heads, dim, block_size, dtype=dtype), torch.zeros(9, heads, block_size, dim, dtype=dtype)
    )


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize(("dim", "rot"), [(8, 8), (64, 64), (80, 32), (96, 96), (128, 64), (80, 20)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rope_and_cache_matches_reference(
    isa: str, dtype: torch.dtype, block_size: int, dim: int, rot: int, has_norms: bool
) -> None:
    tokens, heads, kv_heads = 7, 5, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    positions, slots = int32([0, 3, 99, 5, 5, 1, 2]), int32([8, 0, 3, -1, 1, 2, 7])
    cos_sin = torch.randn(100, rot)
    norms = {"q_norm": torch.rand(dim), "k_norm": torch.rand(dim), "eps": 1e-6} if has_norms else {}
    caches, rotated = [], []
    for op in (ops.rope_and_cache, ops.rope_and_cache_reference):
        q, k, v = qkv.clone().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
        kv = make_cache(dtype, kv_heads, dim, block_size)
        op(q, k, v, cos_sin, positions, slots, kv, **norms)
        rotated.append(q)
        caches.append(kv)
    # Products and sums are rounded alike; only the norms' sums run in another order.
    exact = {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(rotated[0], rotated[1], **(exact if not has_norms else {"rtol": 1e-5, "atol": 1e-5}))
    loose = {"rtol": 1e-2, "atol": 1e-2} if dtype is not torch.float32 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(caches[0].k, caches[1].k, **(loose if has_norms else exact))
    torch.testing.assert_close(caches[0].v, caches[1].v, **exact)


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_cache_write_rounds_every_value_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    """Ties, subnormals, overflow, infinities and NaN of each storage format."""
    bits = torch.randint(
        -(2**31), 2**31 - 1, (4096 - 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    special = torch.tensor(
        [0.0, -0.0, 1e-45, 6e-8, 2.9e-8, 3e-8, 6.1e-5, 6.09e-5, 65504.0, 65519.9, 65520.0, 1e38, 3.4e38, 1.0 + 2**-9]
        + [float("inf"), float("nan")]
    )
    near_ties = bits.view(torch.float32)
    values = torch.cat((special, near_ties, torch.randn(4096), torch.randn(4096) * 1e-5)).view(-1, 1, 64)
    tokens = values.shape[0]
    kv = KVLayer(torch.zeros(tokens, 1, 64, 1, dtype=dtype), torch.zeros(tokens, 1, 1, 64, dtype=dtype))
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=1)
    zeros = torch.zeros(tokens, dtype=torch.int32)
    slots = torch.arange(tokens, dtype=torch.int32)
    ops.rope_and_cache(values.clone(), torch.zeros_like(values), values, cos_sin, zeros, slots, kv)
    torch.testing.assert_close(kv.v.view(-1, 1, 64), values.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 30, 400])
def test_rope_bits_do_not_depend_on_the_batch(isa: str, tokens: int) -> None:
    q, k = torch.randn(tokens, 9, 64), torch.randn(tokens, 3, 64)
    cos_sin = torch.randn(tokens, 64)
    positions = torch.arange(tokens, dtype=torch.int32)
    kv = KVLayer(torch.zeros(tokens, 3, 64, 1), torch.zeros(tokens, 3, 1, 64))
    alone = KVLayer(kv.k.clone(), kv.v.clone())
    before = q.clone()
    ops.rope_and_cache(q, k, k, cos_sin, positions, positions, kv)
    for token in {0, tokens // 2, tokens - 1}:
        one = slice(token, token + 1)
        single = before[one].clone()
        ops.rope_and_cache(single, k[one], k[one], cos_sin, positions[one], positions[one], alone)
        assert torch.equal(single[0], q[token])
        assert torch.equal(alone.k[token], kv.k[token])


def test_other_dtypes_run_the_reference() -> None:
    x, weight = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(64)
    assert ops.rms_norm(x, weight, 1e-5).dtype is torch.bfloat16
    assert ops.swiglu(x).shape == (3, 32)

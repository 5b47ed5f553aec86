"""The torch references of the CUDA ops against the CPU's kernels, which have tests of their own: no card is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.attention_case import Shape, make_batch, make_kv
from trireme.models.cpu import ops
from trireme.models.cpu.packed_ops import linear, pack
from trireme.models.cuda import reference
from trireme.models.cuda.layers.linear import Fp8Linear
from trireme.models.cuda.ops import FP8_MAX, CudaPagedKV, Scales
from trireme.models.forward import ForwardBatch, KVLayer
from trireme.models.weights.gguf_expand import dequantize
from trireme.models.weights.packed import int8_rows

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_rms_norm() -> None:
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    found = reference.rms_norm_reference(x, weight, 1e-5, torch.empty(5, 96))
    torch.testing.assert_close(found, ops.rms_norm(x, weight, 1e-5))
    mine, theirs = residual.clone(), residual.clone()
    found = reference.rms_norm_reference(x, weight - 1, 1e-5, torch.empty(5, 96), residual=mine, offset=1.0)
    torch.testing.assert_close(found, ops.add_rms_norm(x, theirs, weight, 1e-5))
    torch.testing.assert_close(mine, theirs)


def test_scales_of_a_product_are_as_if_they_had_been_applied() -> None:
    scales = Scales(torch.rand(5), torch.rand(96))
    x, residual, weight = torch.randn(5, 96), torch.randn(5, 96), torch.randn(96)
    applied, mine, theirs = x * scales.rows[:, None] * scales.columns, residual.clone(), residual.clone()
    found = reference.rms_norm_reference(x, weight, 1e-5, torch.empty(5, 96), residual=mine, scales=scales)
    expected = reference.rms_norm_reference(applied, weight, 1e-5, torch.empty(5, 96), residual=theirs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine, theirs)
    found = reference.gated_activation_reference(x, torch.empty(5, 48), "silu", scales)
    torch.testing.assert_close(found, reference.gated_activation_reference(applied, torch.empty(5, 48), "silu"))
    caches = [CudaPagedKV(torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16)) for _ in range(2)]
    at, table = torch.arange(5, dtype=torch.int32), torch.randn(5, 16)
    reference.rotary_and_cache_reference(x, 2, caches[0], table, at, at, scales=scales)
    reference.rotary_and_cache_reference(applied, 2, caches[1], table, at, at)
    torch.testing.assert_close(x, applied)
    torch.testing.assert_close(caches[0].k, caches[1].k)
    torch.testing.assert_close(caches[0].v, caches[1].v)


def test_layer_norm() -> None:
    x, residual, weight, bias = torch.randn(5, 96) + 3, torch.randn(5, 96), torch.randn(96), torch.randn(96)
    for shift in (bias, None):
        found = reference.layer_norm_reference(x, weight, shift, 1e-5, torch.empty(5, 96))
        expected = torch.nn.functional.layer_norm(x, (96,), weight, shift, 1e-5)
        torch.testing.assert_close(found, expected)
    scales = Scales(torch.rand(5), torch.rand(96))
    applied, summed = x * scales.rows[:, None] * scales.columns, residual.clone()
    found = reference.layer_norm_reference(x, weight, bias, 1e-5, torch.empty(5, 96), residual=summed, scales=scales)
    torch.testing.assert_close(summed, residual + applied)
    torch.testing.assert_close(found, torch.nn.functional.layer_norm(summed, (96,), weight, bias, 1e-5))
    out, scale = torch.empty(5, 96, dtype=torch.int8), torch.empty(5)
    reference.layer_norm_narrow_reference(x, weight, bias, 1e-5, out, scale, residual=residual, scales=scales)
    assert ((out * scale[:, None] - found).abs() <= found.abs().amax(1, keepdim=True) / 254 * 1.001).all()


def test_activations_without_a_gate() -> None:
    x, act = torch.randn(3, 64), torch.nn.functional
    for gate, expected in {
        "relu": act.relu(x),
        "gelu": act.gelu(x),
        "gelu_tanh": act.gelu(x, approximate="tanh"),
        "silu": act.silu(x),
    }.items():
        torch.testing.assert_close(reference.activation_reference(x, torch.empty(3, 64), gate), expected)
    scales = Scales(torch.rand(3), torch.rand(64))
    found = reference.activation_reference(x, torch.empty(3, 64), "relu", scales)
    torch.testing.assert_close(found, act.relu(x) * scales.rows[:, None] * scales.columns)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rotary_and_cache(normed: bool, rotary: int) -> None:
    heads, kv_heads, dim, tokens = 6, 2, 16, 9
    qkv, table = torch.randn(tokens, (heads + 2 * kv_heads) * dim), torch.randn(50, rotary)
    positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
    slots = torch.randperm(4 * 8)[:tokens].int()
    slots[2] = -1
    norms = [torch.randn(dim), torch.randn(dim)] if normed else [None, None]
    mine = CudaPagedKV(*(torch.zeros(4, kv_heads, 8, dim) for _ in range(2)))
    theirs = make_kv(make_batch([(8, 1)], 8), Shape(heads, kv_heads, dim, 8), torch.float32)
    q, k, v = qkv.clone().unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
    ops.rope_and_cache(q, k, v, table, positions, slots, theirs, *norms)
    reference.rotary_and_cache_reference(qkv, heads, mine, table, positions, slots, q_norm=norms[0], k_norm=norms[1])
    torch.testing.assert_close(qkv.unflatten(1, (-1, dim))[:, :heads], q)
    for slot in slots[slots >= 0].tolist():
        at = (slot // 8, slice(None), slot % 8)
        torch.testing.assert_close(mine.k[at], tokens_of(theirs)[0][slot])
        torch.testing.assert_close(mine.v[at], tokens_of(theirs)[1][slot])
    assert mine.k.count_nonzero() == (tokens - 1) * kv_heads * dim


def tokens_of(kv: KVLayer) -> tuple[Tensor, Tensor]:
    """Keys and values by slot, [slots, Hk, D], through the reference that reads the CPU's layout."""
    blocks, block_size = kv.k.shape[0], kv.k.shape[3]
    keys, values = ops._gather_row(kv, torch.arange(blocks, dtype=torch.int32), blocks * block_size)
    return keys.transpose(0, 1), values.transpose(0, 1)


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 20.0)])
def test_decode_attention(window: int, softcap: float) -> None:
    batch, shape = make_batch([(33, 1), (5, 1), (17, 1)], 16), Shape()
    kv, q = make_kv(batch, shape, torch.float32), torch.randn(3, shape.heads, shape.dim)
    expected = ops.paged_attention(q, kv, batch, 0.3, window or None, softcap=softcap)
    torch.testing.assert_close(
        decode(q, kv, batch, shape, window=window, softcap=softcap), expected, rtol=1e-5, atol=2e-6
    )


def decode(
    q: Tensor, kv: KVLayer, batch: ForwardBatch, shape: Shape, *, window: int = 0, softcap: float = 0.0
) -> Tensor:
    blocks = kv.k.shape[0]
    k, v = (x.view(blocks, shape.block_size, shape.kv_heads, shape.dim).transpose(1, 2) for x in tokens_of(kv))
    return reference.decode_attention_reference(
        q.flatten(1),
        shape.heads,
        CudaPagedKV(k, v),
        batch.block_table.clamp(min=0),
        batch.context_len,
        0.3,
        torch.empty(len(q), shape.heads * shape.dim),
        window=window,
        softcap=softcap,
    )


def test_decode_attention_of_padding_sinks_and_fp8() -> None:
    k, v, q = torch.randn(3, 1, 4, 16), torch.randn(3, 1, 4, 16), torch.randn(2, 32)
    table, context = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32), torch.tensor([6, 0], dtype=torch.int32)
    out = torch.full((2, 32), float("nan"))
    reference.decode_attention_reference(
        q, 2, CudaPagedKV(k, v), table, context, 1.0, out, sinks=torch.full((2,), -1e9)
    )
    keys, values = (torch.cat((x[2, 0], x[0, 0]))[:6] for x in (k, v))
    expected = (q[0].view(2, 16) @ keys.T).softmax(-1) @ values
    torch.testing.assert_close(out[0].view(2, 16), expected)
    assert (out[1] == 0).all()
    reference.decode_attention_reference(q, 2, CudaPagedKV(k, v), table, context, 1.0, out, sinks=torch.full((2,), 1e9))
    assert out[0].abs().max() < 1e-6  # a sink takes all the weight
    narrow = CudaPagedKV((k / 0.5).to(FP8), (v / 0.25).to(FP8), 0.5, 0.25)
    reference.decode_attention_reference(q, 2, narrow, table, context, 1.0, out)
    assert float((out[0].view(2, 16) - expected).norm() / expected.norm()) < 0.15


def test_fp8_is_written_with_its_scale_and_saturates() -> None:
    qkv = torch.randn(2, 3 * 16)
    qkv[0, 32] = 1e4
    kv = CudaPagedKV(*(torch.zeros(1, 1, 4, 16).to(FP8) for _ in range(2)), 0.5, 0.25)
    identity = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), 1)
    slots = torch.tensor([0, 3], dtype=torch.int32)
    reference.rotary_and_cache_reference(qkv, 1, kv, identity, slots, slots)
    assert kv.v.float()[0, 0, 0, 0] == FP8_MAX
    torch.testing.assert_close(kv.k.float()[0, 0, [0, 3]] * 0.5, qkv[:, 16:32], rtol=0.07, atol=1e-3)
    torch.testing.assert_close(kv.v.float()[0, 0, 3] * 0.25, qkv[1, 32:], rtol=0.07, atol=1e-3)


def test_gated_activation() -> None:
    gate_up = torch.randn(3, 64)
    found = reference.gated_activation_reference(gate_up, torch.empty(3, 32), "silu")
    torch.testing.assert_close(found, ops.swiglu(gate_up))
    found = reference.gated_activation_reference(gate_up, torch.empty(3, 32), "gelu_tanh")
    torch.testing.assert_close(found, ops.geglu(gate_up))


def test_skinny_linear() -> None:
    x, weight, bias, scale = torch.randn(3, 64), torch.randn(8, 64), torch.randn(8), torch.rand(8)
    found = reference.skinny_linear_reference(x, weight.to(FP8), torch.empty(3, 8), bias, scale=scale)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight.to(FP8).float() * scale[:, None], bias))


def test_two_planes_of_float8_have_all_bits_of_bfloat16() -> None:
    x = torch.randn(6, 512) * torch.tensor([1e-20, 1e-3, 1.0, 3e4, 1e30, 0.0])[:, None]
    x[2, :8] = torch.tensor([255.0, -256.0, 257.0, 448.0, -480.0, 511.0, 3.9e-3, -1.0])
    x = x.bfloat16()
    kept, peak = reference.two_planes(x), x.double().abs().amax(-1, keepdim=True)
    near = x.double().abs() > peak * 2.0**-13
    assert torch.equal(kept[near], x.double()[near])
    assert ((kept - x.double()).abs() <= peak * 2.0**-20).all()
    assert (reference.two_planes(x.half()) - x.half().double())[:3].abs().max() < 511 * 2.0**-8


def test_q4_k_values_are_those_of_the_loader() -> None:
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (4 * 3, 144), dtype=np.uint8)
    blocks[:, :4] = (generator.random((12, 2)) * 0.01).astype(np.float16).view(np.uint8)
    expected = torch.from_numpy(dequantize("Q4_K", blocks, 4, 768))
    torch.testing.assert_close(
        reference.q4_k_values(torch.from_numpy(blocks).view(4, -1)), expected, rtol=1e-6, atol=1e-7
    )


def test_int8_runs() -> None:
    x = torch.randn(3, 96)
    x[0, :32], x[1, 32:64], x[2, 64] = 0.0, 1e-35, 100.0
    found = reference.int8_runs(x)
    most = x.unflatten(1, (3, 32)).abs().amax(-1)
    assert (found[0, :32] == 0).all()
    assert (found[1, 32:64] == 0).all()
    assert bool(((found - x).abs().unflatten(1, (3, 32)) <= most[..., None] / 254 * 1.0001 + 1e-34).all())
    torch.testing.assert_close(found.unflatten(1, (3, 32)).abs().amax(-1), most, rtol=1e-6, atol=1e-34)
    assert found.isfinite().all()
    x[0, 3] = float("nan")
    assert reference.int8_runs(x)[0, :32].isnan().all()
    assert torch.equal(reference.int8_runs(found)[1:], found[1:])


def test_quantize_rows() -> None:
    x = torch.randn(4, 64) * torch.tensor([[1e-3], [1.0], [1e3], [0.0]])
    scale = torch.empty(4)
    out = reference.quantize_rows_reference(x, torch.empty(4, 64, dtype=FP8), scale)
    assert out.float().abs().amax(1).tolist() == [FP8_MAX, FP8_MAX, FP8_MAX, 0.0]
    torch.testing.assert_close(out.float() * scale[:, None], x, rtol=0.07, atol=float(scale[2]))
    weight = torch.randn(8, 64)
    narrow, scales = Fp8Linear.quantize(weight)
    assert float((narrow.float() * scales[:, None] - weight).norm() / weight.norm()) < 0.03


def test_quantize_rows_to_int8() -> None:
    """The CPU's definition: its INT8 products with a weight of ones give the same sums."""
    x = torch.randn(7, 96)
    x[1], x[2], x[3, 5], x[4, 9], x[5, 0] = 0.0, 1e-31, float("nan"), float("inf"), 1e30
    out, scale = torch.full((7, 96), 99, dtype=torch.int8), torch.empty(7)
    reference.quantize_rows_reference(x, out, scale)
    assert out.abs().amax(1).tolist() == [127, 0, 0, 0, 0, 127, 127]
    assert scale.isnan().tolist() == [False, False, False, True, True, False, False]
    assert scale[1:3].tolist() == [0.0, 0.0]
    usual = out[[0, 6]].float() * scale[[0, 6], None]
    assert ((usual - x[[0, 6]]).abs() <= x[[0, 6]].abs().amax(1, keepdim=True) / 254 * 1.0001).all()
    weight, w_scale = torch.randint(-127, 128, (20, 96), dtype=torch.int8), torch.rand(20)
    packed = pack("INT8", int8_rows(weight.numpy(), w_scale.numpy()), 20, 96)
    expected, bias = linear(x, packed, bias=torch.linspace(-1, 1, 20)), torch.linspace(-1, 1, 20)
    found = reference.skinny_int8_reference(out, scale, weight, w_scale, torch.empty(7, 20), bias)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    sums = torch._int_mm(out, weight.T)
    scaled = reference.scale_int8_reference(sums, scale, w_scale, torch.empty(7, 20), bias)
    torch.testing.assert_close(scaled, expected, rtol=0, atol=0, equal_nan=True)


def test_gather_rows_and_copy_blocks() -> None:
    table, ids = torch.randn(10, 4), torch.tensor([5, 40, 14], dtype=torch.int32)
    out = reference.gather_rows_reference(table, ids, torch.empty(3, 4), first=5, scale=2.0)
    torch.testing.assert_close(out, torch.stack((table[0] * 2, torch.zeros(4), table[9] * 2)))
    cache = torch.randn(6, 2)
    expected = cache[[0, 1, 0, 3, 1, 5]]
    reference.copy_blocks_reference(cache, torch.tensor([[0, 2], [1, 4]]))
    assert torch.equal(cache, expected)

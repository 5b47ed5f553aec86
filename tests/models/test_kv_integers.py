"""Keys and values as integers: how exact they are, what a block costs, and that generation does not depend on the batch.

The bound on an output of attention, against float64 on unrounded queries, keys and values, is

    ((e^(2 E) - 1) + 1 / (2 L) + 32 / 32767) * largest |v| seen        L = 32767 (int16) or 127 (int8)
    E = scale * sqrt(D) / 2 * (|q| |k| / 32767 + |q| * unit of k)      how far a score may be off: rounded q, rounded k

where |q|, |k| are the greatest lengths; E moves any weight by at most e^(2 E), the last term is the rounding of 64 weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.attention_case import Shape, empty_kv, make_batch
from tests.models.drive import RankedModel, greedy, load, logits_of
from tests.models.isas import instruction_set
from tests.models.tiny import make_tiny
from trireme.machine.memory_budget import kv_token_bytes
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.cpu import ops
from trireme.models.cpu.kv_layout import LARGEST, fill_nan, kv_shapes
from trireme.models.forward import HostKV
from trireme.models.native import load_native
from trireme.topology.mesh import Mesh
from trireme.workers.kv.tensors import allocate_kv, block_bytes, choose_kv_dtype, copy_blocks

native = load_native()
ALL_VARIANTS = ["portable", "avx2", "avx512vnni"]
VARIANTS = [name for name in ALL_VARIANTS if name in native.isas()]


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


def attend_prompt(
    shape: Shape, length: int, dtype: torch.dtype, spread: float
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Native attention of one prompt through a cache of `dtype`, the same in float64 without one, and the bound."""
    generator = torch.Generator().manual_seed(int(spread * 10) + length)
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.dim
    q = torch.randn(length, heads, dim, generator=generator) * spread
    k = torch.randn(length, kv_heads, dim, generator=generator)
    v = torch.randn(length, kv_heads, dim, generator=generator)
    batch = make_batch([(length, length)], shape.block_size)
    kv = empty_kv(int(batch.block_table.max()) + 1, kv_heads, dim, shape.block_size, dtype)
    flat = torch.cat((torch.ones(length, dim // 2), torch.zeros(length, dim // 2)), dim=1)
    ops.rope_and_cache(q, k, v, flat, batch.positions, batch.slots, kv)
    got = ops.paged_attention(q, kv, batch, dim**-0.5).view(length, heads, dim)

    wide = [x.double().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v)]
    scores = torch.einsum("thd,shd->hts", wide[0], wide[1]) * dim**-0.5
    weights = scores.masked_fill(torch.ones(length, length).tril() == 0, -math.inf).softmax(-1)
    want = torch.einsum("hts,shd->thd", weights, wide[2])
    if dtype not in (torch.int8, torch.int16):
        return got, want, 0.0
    largest = LARGEST[str(dtype).removeprefix("torch.")]
    long_q, long_k = float(q.norm(dim=-1).max()), float(k.norm(dim=-1).max())
    unit = float((k.abs().max() if dtype is torch.int8 else k.norm(dim=-1).max()) / largest)
    off = dim**-0.5 * math.sqrt(dim) / 2 * (long_q * long_k / 32767 + long_q * unit)
    return got, want, (math.expm1(2 * off) + 0.5 / largest + 32 / 32767) * float(v.abs().max())


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize(("dim", "block_size"), [(64, 16), (80, 16), (10, 6), (128, 32)])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_attention_is_within_the_stated_bound(
    isa: str, dtype: torch.dtype, dim: int, block_size: int, spread: float
) -> None:
    got, want, bound = attend_prompt(Shape(6, 2, dim, block_size), 150, dtype, spread)
    error = (got - want).abs()
    assert float(error.max()) <= bound
    assert float(error.square().mean().sqrt()) <= (2e-2 if dtype is torch.int8 else 3e-4) * max(1.0, spread)


def test_int16_is_as_exact_as_float16(isa: str) -> None:
    for spread in (0.5, 2.0):
        rms = []
        for dtype in (torch.int16, torch.float16):
            got, want, _ = attend_prompt(Shape(3, 1, 64, 16), 300, dtype, spread)
            rms.append(float((got - want).square().mean().sqrt()))
        assert rms[0] <= 1.5 * rms[1], rms


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("block_size", [2, 6, 16])
@pytest.mark.parametrize(("dim", "rot"), [(8, 8), (64, 64), (80, 20)])
def test_cache_write_matches_reference(isa: str, dtype: torch.dtype, block_size: int, dim: int, rot: int) -> None:
    """The same units; numbers may differ by one where a quotient is near a half."""
    generator = torch.Generator().manual_seed(dim)
    k, v = torch.randn(5, 2, dim, generator=generator), torch.randn(5, 2, dim, generator=generator) * 3
    v[1] = 0
    positions = torch.tensor([0, 3, 7, 5, 1], dtype=torch.int32)
    slots = torch.tensor([2, 0, -1, 2 * block_size + 1, block_size], dtype=torch.int32)
    cos_sin = torch.randn(10, rot, generator=generator)
    caches = []
    for op in (ops.rope_and_cache, ops.rope_and_cache_reference):
        kv = empty_kv(4, 2, dim, block_size, dtype)
        op(torch.randn(5, 4, dim), k, v, cos_sin, positions, slots, kv, k_norm=torch.ones(dim))
        caches.append(kv)
    for mine, reference in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        numbers = dim * block_size
        one, other = mine.flatten(2), reference.flatten(2)
        assert int((one[..., :numbers].int() - other[..., :numbers].int()).abs().max()) <= 1
        units = [x.view(torch.float32)[..., -block_size:] for x in (one, other)]
        torch.testing.assert_close(units[0], units[1], rtol=1e-6, atol=0, equal_nan=True)
    written = torch.unique(torch.nonzero(~caches[0].v.flatten(2).view(torch.float32)[..., -block_size:].isnan())[:, 0])
    assert written.tolist() == sorted({slot // block_size for slot in slots.tolist() if slot >= 0})


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_are_not_hidden(isa: str, dtype: torch.dtype, bad: float) -> None:
    """A NaN or an infinity in a key or value reaches every query that sees it, and no other row."""
    shape = Shape(3, 1, 64, 16)
    batch = make_batch([(40, 40), (30, 30)], 16)
    flat = torch.cat((torch.ones(64, 32), torch.zeros(64, 32)), dim=1)
    for index in (1, 2):
        q, k, v = torch.randn(70, 3, 64), torch.randn(70, 1, 64), torch.randn(70, 1, 64)
        (k if index == 1 else v)[45, 0, 5] = bad
        kv = empty_kv(int(batch.block_table.max()) + 1, 1, 64, 16, dtype)
        ops.rope_and_cache(q, k, v, flat, batch.positions, batch.slots, kv)
        out = ops.paged_attention(q, kv, batch, shape.dim**-0.5)
        assert out[45:].isnan().any(1).all()
        assert out[:40].isfinite().all()


def test_poisoned_and_copied_blocks() -> None:
    """A block that nobody wrote shows as NaN; a copied block holds the same numbers and units."""
    k_shape, v_shape = kv_shapes(3, 1, 16, 4, "int8")
    kv = HostKV(np.zeros(k_shape, np.int8), np.zeros(v_shape, np.int8))
    fill_nan(kv.k, [1])
    units = kv.k.reshape(3, 1, -1).view(np.float32)[..., -4:]
    assert np.isnan(units[1]).all()
    assert not units[[0, 2]].any()
    kv.k[0] = np.arange(80).reshape(20, 4)
    copy_blocks([kv], [(0, 2)])
    assert np.array_equal(kv.k[2], kv.k[0])


def test_memory_is_counted_with_the_units(tmp_path: Path) -> None:
    path = make_tiny(tmp_path)
    model, arch = load(path), read_arch(find_model(path))
    for name, each in (("int8", arch.head_dim + 4), ("int16", 2 * arch.head_dim + 4)):
        dtype, decision = choose_kv_dtype(name, arch, 16)
        assert (dtype.name, decision.value) == (name, name)
        expected = 2 * arch.num_layers * arch.num_kv_heads * each
        assert kv_token_bytes(arch, name, Mesh(1, 1, 1)) == expected
        assert block_bytes(model, 16, dtype) == 16 * expected
        assert sum(layer.k.nbytes + layer.v.nbytes for layer in allocate_kv(model, 5, 16, dtype)) == 5 * 16 * expected
        assert all(layer.k.ctypes.data % 64 == 0 for layer in allocate_kv(model, 5, 16, dtype))


PROMPTS = [[256, 72, 105], [256, *range(40, 77)], [9], list(range(200, 217))]


@pytest.mark.parametrize("dtype", [torch.int16, torch.int8])
def test_a_model_gives_the_same_alone_in_a_batch_and_in_chunks(tmp_path: Path, dtype: torch.dtype) -> None:
    model = load(make_tiny(tmp_path))
    together = greedy(model, PROMPTS, 12, kv_dtype=dtype)
    for prompt, tokens in zip(PROMPTS, together, strict=True):
        assert greedy(model, [prompt], 12, kv_dtype=dtype) == [tokens]
    text = PROMPTS[1] + together[1]
    whole = logits_of(model, text, kv_dtype=dtype)
    for chunk in (1, 7, 16):
        assert torch.equal(logits_of(model, text, chunk=chunk, kv_dtype=dtype), whole)
    assert torch.equal(logits_of(model, text, chunk=9, kv_dtype=dtype, block_size=16), whole)


def test_logits_stay_near_those_of_a_float_cache(tmp_path: Path) -> None:
    """int16 is as near as float16, int8 within 3 %; a token differs from the exact first choice only at a near tie."""
    model = load(make_tiny(tmp_path))
    for dtype in (torch.int16, torch.int8):
        tokens = greedy(model, PROMPTS[1:2], 24, kv_dtype=dtype)[0]
        text = PROMPTS[1] + tokens
        exact = logits_of(model, text)
        off = logits_of(model, text, kv_dtype=dtype) - exact
        half = logits_of(model, text, kv_dtype=torch.float16) - exact
        rms, of_half, wide = (float(x.square().mean().sqrt()) for x in (off, half, exact))
        assert rms <= (2 * of_half if dtype is torch.int16 else 0.03 * wide), (rms, of_half, wide)
        at = torch.arange(len(PROMPTS[1]) - 1, len(text) - 1)
        margin = exact[at].amax(-1) - exact[at, torch.tensor(tokens)]
        assert float(margin.max()) <= 2 * float(off.abs().max())


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
def test_ranks_together_change_no_bit(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Every head has units of its own, so it does not matter which rank holds it."""
    path = make_tiny(tmp_path)
    text = PROMPTS[1] + PROMPTS[3]
    alone = logits_of(load(path), text, kv_dtype=torch.int8)
    ranks = RankedModel(path, tp=shape[0], pp=shape[1])
    assert torch.equal(logits_of(ranks, text, chunk=9, kv_dtype=torch.int8), alone)

"""Native paged attention against its torch reference, and the promise that grouping queries changes no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.models.attention_case import Shape, int32, make_batch, make_kv
from tests.models.isas import instruction_set
from trireme.models.cpu import ops
from trireme.models.forward import ForwardBatch, KVLayer
from trireme.models.native import load_native

native = load_native()
ALL_VARIANTS = ["portable", "avx2", "avx512vnni"]
VARIANTS = [name for name in ALL_VARIANTS if name in native.isas()]
INTEGERS = [torch.int16, torch.int8]
MIXED = [(1, 1), (5, 5), (33, 1), (70, 7), (16, 16), (300, 1), (64, 64), (65, 20)]


@pytest.fixture(params=VARIANTS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_set(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = native.num_threads()
    yield
    native.set_num_threads(before)


def queries(batch: ForwardBatch, shape: Shape, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(batch.positions), shape.heads, shape.dim, generator=generator)


def check(batch: ForwardBatch, shape: Shape, dtype: torch.dtype, window: int | None = None) -> None:
    kv, q = make_kv(batch, shape, dtype), queries(batch, shape)
    scale = shape.dim**-0.5
    got = ops.paged_attention(q, kv, batch, scale, window)
    want = ops.paged_attention_reference(q, kv, batch, scale, window)
    assert torch.isfinite(want).all()
    if dtype in INTEGERS:  # the kernel rounds queries and weights too; test_kv_integers.py has the bound
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "block_size"),
    [
        *((dtype, size) for dtype in (torch.float32, torch.float16, torch.bfloat16) for size in (1, 4, 16, 32)),
        *((dtype, size) for dtype in INTEGERS for size in (2, 6, 16, 32)),
    ],
)
def test_attention_matches_reference_over_dtypes_and_block_sizes(isa: str, dtype: torch.dtype, block_size: int) -> None:
    check(make_batch(MIXED, block_size), Shape(block_size=block_size), dtype)


@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 128, 256])
def test_attention_matches_reference_over_head_dims(isa: str, dim: int) -> None:
    shape = Shape(heads=3, kv_heads=1, dim=dim)
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), shape, torch.float32)
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), shape, torch.bfloat16)
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), shape, torch.int16)
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), shape, torch.int8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (9, 3), (5, 1), (7, 1), (14, 2), (71, 1)])
def test_attention_matches_reference_over_head_groups(isa: str, heads: int, kv_heads: int) -> None:
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), Shape(heads=heads, kv_heads=kv_heads), torch.float32)
    check(make_batch([(40, 40), (77, 1), (20, 3)], 16), Shape(heads=heads, kv_heads=kv_heads), torch.int16)


@pytest.mark.parametrize("window", [1, 3, 16, 17, 64, 100, 256, 300])
@pytest.mark.parametrize("block_size", [4, 16])
def test_attention_with_sliding_window(isa: str, window: int, block_size: int) -> None:
    for dtype in (torch.float32, torch.int16):
        check(make_batch([*MIXED, (600, 90)], block_size), Shape(block_size=block_size), dtype, window)


def test_blocks_before_the_window_are_not_read() -> None:
    """A scheduler may free them: their table entries are stale, their contents anything."""
    shape = Shape()
    batch = make_batch([(600, 2)], 16)
    kv, q = make_kv(batch, shape, torch.float32), queries(batch, shape)
    want = ops.paged_attention(q, kv, batch, 0.25, 100)
    batch.block_table[0, : (598 - 99) // 16] = -(2**30)
    assert torch.equal(ops.paged_attention(q, kv, batch, 0.25, 100), want)


@pytest.mark.parametrize("context", [255, 256, 257, 512, 1300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_long_contexts_cut_into_parts(isa: str, threads: None, context: int, dtype: torch.dtype) -> None:
    """One decode row with a long context is spread over the threads; the bits are those of one thread."""
    shape = Shape(heads=9, kv_heads=3, dim=64)
    batch = make_batch([(context, 1)], 16)
    kv, q = make_kv(batch, shape, dtype), queries(batch, shape)
    want = ops.paged_attention_reference(q, kv, batch, 0.125)
    results = []
    for count in (1, 2, 3):
        native.set_num_threads(count)
        results.append(ops.paged_attention(q, kv, batch, 0.125))
    loose = {"rtol": 1e-3, "atol": 1e-3} if dtype in INTEGERS else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(results[0], want, **loose)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def slice_row(batch: ForwardBatch, row: int, first: int, last: int) -> ForwardBatch:
    """Row `row` alone with its tokens at positions [first, last) as the new ones."""
    start, stop = int(batch.query_start[row]), int(batch.query_start[row + 1])
    offset = int(batch.context_len[row]) - (stop - start)
    inside = slice(start + first - offset, start + last - offset)
    return ForwardBatch(
        token_ids=batch.token_ids[inside],
        positions=batch.positions[inside],
        slots=batch.slots[inside],
        query_start=int32([0, last - first]),
        context_len=int32([last]),
        block_table=batch.block_table[row : row + 1],
        logits_index=int32([last - first - 1]),
        choices=batch.choices[row : row + 1],
        num_prompt=batch.num_prompt[row : row + 1],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, *INTEGERS])
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (4, None), (16, 50), (32, 300)])
def test_attention_bits_do_not_depend_on_the_batch_or_the_chunks(
    isa: str, threads: None, dtype: torch.dtype, block_size: int, window: int | None
) -> None:
    """Whole prefill in a mixed batch = each row alone, in chunks of any size, with any number of threads."""
    shape = Shape(heads=9, kv_heads=3, dim=32, block_size=block_size)
    rows = [(70, 70), (333, 333), (5, 1), (600, 1), (17, 17), (150, 1), (90, 5)]
    batch = make_batch(rows, block_size)
    kv, q = make_kv(batch, shape, dtype), queries(batch, shape)
    native.set_num_threads(2)
    whole = ops.paged_attention(q, kv, batch, 0.2, window)
    native.set_num_threads(1)
    assert torch.equal(whole, ops.paged_attention(q, kv, batch, 0.2, window))
    for row, (context, new) in enumerate(rows):
        start = int(batch.query_start[row])
        for chunk in (1, 7, 16, 64, 1000):
            if chunk == 1 and new > 100:
                continue
            native.set_num_threads(2 if chunk == 16 else 1)
            for first in range(context - new, context, chunk):
                last = min(context, first + chunk)
                at = start + first - (context - new)
                inside = slice(at, at + last - first)
                part = ops.paged_attention(q[inside], kv, slice_row(batch, row, first, last), 0.2, window)
                assert torch.equal(part, whole[inside]), (row, chunk, first)


@pytest.mark.parametrize("dtype", [torch.float32, *INTEGERS])
def test_fused_equals_its_two_halves(isa: str, dtype: torch.dtype) -> None:
    shape = Shape(heads=9, kv_heads=3, dim=64)
    batch = make_batch(MIXED, 16)
    kv = make_kv(batch, shape, dtype)
    other = KVLayer(kv.k.clone(), kv.v.clone())
    qkv = torch.randn(len(batch.positions), (9 + 6) * 64)
    cos_sin = torch.randn(512, 64)
    norms = {"q_norm": torch.rand(64), "k_norm": torch.rand(64)}
    split = qkv.clone().unflatten(1, (-1, 64)).split([9, 3, 3], dim=1)
    fused = ops.rope_cache_attention(qkv, kv, batch, cos_sin, 0.125, window=40, **norms)
    ops.rope_and_cache(*split, cos_sin, batch.positions, batch.slots, other, **norms)
    assert torch.equal(fused, ops.paged_attention(split[0], other, batch, 0.125, 40))
    assert torch.equal(kv.k.nan_to_num(), other.k.nan_to_num())
    assert torch.equal(kv.v.nan_to_num(), other.v.nan_to_num())


def test_a_nan_stays_in_its_row() -> None:
    shape = Shape()
    batch = make_batch([(40, 4), (50, 50), (30, 1)], 16)
    kv, q = make_kv(batch, shape, torch.float32), queries(batch, shape)
    clean = ops.paged_attention(q, kv, batch, 0.25)
    kv.v[int(batch.block_table[1, 0]), :, 0] = float("nan")
    dirty = ops.paged_attention(q, kv, batch, 0.25)
    assert torch.isnan(dirty[4:54]).all()
    assert torch.equal(dirty[:4], clean[:4])
    assert torch.equal(dirty[54:], clean[54:])
    q[0, 0, 0] = float("nan")
    assert torch.isnan(ops.paged_attention(q, kv, batch, 0.25)[0, : shape.dim]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *INTEGERS], ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_a_nan_query_stays_nan_beside_lanes_without_a_token(isa: str, dtype: torch.dtype, window: int | None) -> None:
    """Whatever an earlier call left in the scratch, and however few lanes of the last vector have a token."""
    shape = Shape()
    for context in range(1, 50):
        batch = make_batch([(context, 1)], 16)
        kv, q = make_kv(batch, shape, dtype), queries(batch, shape)
        clean = ops.paged_attention(q, kv, batch, 0.25, window)
        q[0, 0] = float("nan")
        dirty = ops.paged_attention(q, kv, batch, 0.25, window)
        assert torch.isnan(dirty[0, : shape.dim]).all(), context
        assert torch.equal(dirty[0, shape.dim :], clean[0, shape.dim :]), context


def test_large_scores_do_not_overflow() -> None:
    shape = Shape()
    batch = make_batch([(300, 3), (2, 2)], 16)
    kv, q = make_kv(batch, shape, torch.float32), queries(batch, shape) * 1000
    want = ops.paged_attention_reference(q, kv, batch, 1.0)
    torch.testing.assert_close(ops.paged_attention(q, kv, batch, 1.0), want, rtol=1e-4, atol=1e-4)


def test_rows_without_tokens_are_skipped_and_out_may_be_strided() -> None:
    shape = Shape()
    batch = make_batch([(40, 4), (50, 0), (30, 1)], 16)
    kv, q = make_kv(batch, shape, torch.bfloat16), queries(batch, shape)
    wide = torch.full((5, 200), 7.0)
    out = wide[:, 50 : 50 + 96]
    got = ops.paged_attention(q, kv, batch, 0.25, out=out)
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, ops.paged_attention_reference(q, kv, batch, 0.25), rtol=1e-5, atol=2e-6)
    assert (wide[:, :50] == 7).all()
    assert (wide[:, 146:] == 7).all()


def test_native_calls_check_their_argument_count() -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        native.paged_attention(torch.zeros(1, 1, 8))


def test_a_head_dim_beyond_the_kernels_is_refused() -> None:
    shape = Shape(heads=1, kv_heads=1, dim=1032)
    batch = make_batch([(3, 3)], 16)
    with pytest.raises(ValueError, match="head_dim may be at most 1024"):
        ops.paged_attention(queries(batch, shape), make_kv(batch, shape, torch.float32), batch, 1.0)

"""Every type of GGUF's blocks on a card: values, products of few and many rows, and the engine over files of each type."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_ops import ERROR, HALF, error, poisoned, random
from tests.gpu.test_cuda_quantized import PROMPTS, SHAPE, same_as_on_the_cpu
from tests.models.block_rows import block_rows
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.machine.gpu_formats import OF_BLOCKS
from trireme.models.cuda import ops, reference
from trireme.models.cuda.layers.linear import DeviceMatrix, make_linear
from trireme.models.cuda.weights.gguf_blocks import laid_out
from trireme.models.weights.gguf_expand import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
KINDS = list(OF_BLOCKS)
SIZES = [(1, 256), (7, 768), (100, 512), (201, 2304), (513, 14336), (4096, 4096)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def on_card(kind: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """(rows as the kernels read them, their values in float32)."""
    raw = block_rows(kind, n, k)
    values = torch.from_numpy(np.ascontiguousarray(dequantize(kind, raw, n, k))).cuda()
    return laid_out(kind, torch.from_numpy(raw).cuda(), k), values


def test_kernels_and_layouts_agree_on_the_bytes() -> None:
    for form, code in ops.BLOCKS.items():
        assert ops.load().block_bytes(code) == ops.BLOCK_BYTES[form]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_expand_blocks(dtype: torch.dtype, kind: str) -> None:
    blocks, values = on_card(kind, 37, 768)
    found = ops.expand_blocks(blocks, poisoned(37, 768, dtype=dtype), form=OF_BLOCKS[kind])
    torch.testing.assert_close(found.float(), values, rtol=ERROR[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_block_linear(dtype: torch.dtype, kind: str, n: int, k: int) -> None:
    """As exact as the sums are for x rounded to int8, within the bound of that for x itself, and one row as it is among others."""
    form = OF_BLOCKS[kind]
    blocks, values = on_card(kind, n, k)
    wide, bias = values.double(), random(n, dtype=dtype)
    at_once = ops.block_linear_rows(form, n, k)
    assert at_once == 4
    for rows in range(1, at_once + 1):
        x = random(rows, k + 64, dtype=dtype)[:, :k]
        x[0, :256], x[-1, 40] = 0, 60
        out = ops.block_linear(x, blocks, poisoned(rows, n, dtype=dtype), bias, form=form)
        rounded = reference.int8_runs(x).double() @ wide.T + bias.double()
        assert error(out, rounded) < ERROR[dtype] / 2
        exact = x.double() @ wide.T + bias.double()
        most = x.double().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1) / 254
        bound = most @ wide.abs().T
        assert bool(((out.double() - exact).abs() <= bound * 1.001 + exact.abs() * ERROR[dtype] + 1e-3).all())
        for row in range(rows):
            alone = ops.block_linear(x[row : row + 1], blocks, poisoned(1, n, dtype=dtype), bias, form=form)
            assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_stays_so(kind: str) -> None:
    form = OF_BLOCKS[kind]
    blocks, _ = on_card(kind, 40, 1024)
    for bad in (math.nan, math.inf, -math.inf):
        x = random(2, 1024, dtype=torch.bfloat16)
        x[1, 700] = bad
        out = ops.block_linear(x, blocks, poisoned(2, 40, dtype=torch.bfloat16), form=form)
        assert out[0].isfinite().all()
        assert not out[1].isfinite().any()


def test_what_it_does_not_have_is_refused() -> None:
    blocks, _ = on_card("Q8_0", 8, 512)
    x, out = random(5, 512, dtype=torch.bfloat16), poisoned(5, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="up to 4 rows; got K 512, 5 rows"):
        ops.block_linear(x, blocks, out, form="q8_0")
    assert ops.block_linear_rows("q8_0", 64, 1 << 20) == 0
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 4, 5, 17, 24, 32, 33, 40, 150])
def test_products_of_any_number_of_rows(dtype: torch.dtype, kind: str, rows: int) -> None:
    """Joined parts with odd numbers of outputs, into columns of a wider tensor."""
    pieces = [on_card(kind, n, 768) for n in (47, 18)]
    values, bias = torch.cat([value for _, value in pieces]).double(), random(65, dtype=dtype)
    linear = make_linear([DeviceMatrix(OF_BLOCKS[kind], blocks) for blocks, _ in pieces], bias)
    x, out = random(rows, 768, dtype=dtype), poisoned(rows, 80, dtype=dtype)
    linear(x, out[:, 8:73])
    exact = x.double() @ values.T + bias.double()
    assert error(out[:, 8:73], exact) < 0.01 + ERROR[dtype]  # int8 by runs errs by 0.005 of normal values
    assert out[:, :8].isnan().all()
    assert out[:, 73:].isnan().all()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_files_through_the_engine(kind: str, tmp_path: Path) -> None:
    path = make_tiny(tmp_path, vocab_size=512, max_position_embeddings=1024, **SHAPE)
    kinds = {"token_embd.weight": "Q8_0", "ffn_down.weight": "Q8_0"}
    file = gguf_from_directory(path, tmp_path / "m.gguf", kind, kinds=kinds)
    same_as_on_the_cpu(file, PROMPTS, 0.15)
